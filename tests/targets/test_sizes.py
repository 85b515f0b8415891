"""Sizes from outside are believed only where a model can have them."""

import pytest
import torch

from specdraft.errors import UserError
from specdraft.targets.sizes import at_most, check_sizes


def test_sizes_of_the_largest_models_pass():
    check_sizes({"num_hidden_layers": 126, "n_routed_experts": 384, "vocab_size": 262_144}, "config.json")
    for key in ("num_hidden_layers", "n_layer", "num_experts", "num_labels"):
        with pytest.raises(UserError, match=f"says {key}=1e[+]09: expected at most"):
            check_sizes({"text_config": {key: 10**9}}, "config.json")


def test_weights_are_counted_while_they_are_made():
    with at_most(2, "here"):
        torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match="here asks for more than 1 weights"), at_most(1, "here"):
        torch.nn.Linear(1, 1)
    torch.nn.Linear(1, 1)
