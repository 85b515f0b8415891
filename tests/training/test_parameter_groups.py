"""Groups of an optimizer: what shares a learning rate and a decay, in an order that checkpoints rely on."""

import pytest
import torch
from torch import nn

from specdraft.errors import UserError
from specdraft.training.parameter_groups import check_factors, parameter_groups

NAMED = {
    "fc.weight": nn.Parameter(torch.zeros(3, 2)),
    "norm.weight": nn.Parameter(torch.zeros(2)),
    "lm_head.weight": nn.Parameter(torch.zeros(4, 2)),
    "fc.bias": nn.Parameter(torch.zeros(3)),
    "midlayer.fc.weight": nn.Parameter(torch.zeros(2, 2)),
}
NAMES = {id(parameter): name for name, parameter in NAMED.items()}


def found(**factors):
    groups = parameter_groups(NAMED, 1e-2, 0.1, {name.replace("_", "."): value for name, value in factors.items()})
    return [([NAMES[id(p)] for p in group["params"]], group["lr"], group["weight_decay"]) for group in groups]


def test_matrices_before_vectors_which_are_not_decayed():
    assert found() == [
        (["fc.weight", "lm_head.weight", "midlayer.fc.weight"], 1e-2, 0.1),
        (["norm.weight", "fc.bias"], 1e-2, 0.0),
    ]
    assert parameter_groups({}, 1e-2, 0.1, {}) == []


def test_a_factor_is_for_the_names_that_contain_its_key_and_the_first_counts():
    assert found(midlayer=0.5, fc=2.0) == [
        (["lm_head.weight"], 1e-2, 0.1),
        (["midlayer.fc.weight"], 0.5e-2, 0.1),
        (["fc.weight"], 2e-2, 0.1),
        (["norm.weight"], 1e-2, 0.0),
        (["fc.bias"], 2e-2, 0.0),
    ]


def test_a_factor_for_nothing_is_refused():
    check_factors(list(NAMED), {"norm": 0.1})
    with pytest.raises(UserError, match=r"has 'embed': expected a part of the name .* as fc.weight"):
        check_factors(list(NAMED), {"norm": 0.1, "embed": 0.1})
