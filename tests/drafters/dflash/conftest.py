"""A drafter of large random weights, so that every part of it matters."""

import pytest
import torch

from specdraft.drafters.dflash import DFlash

VOCABULARY = torch.arange(3, 97, 2)


def build(target, vocabulary=VOCABULARY, kind=DFlash, **options) -> DFlash:
    torch.manual_seed(0)
    drafter = kind.for_target(target, vocabulary, **{"num_layers": 2, "block_size": 5} | options).to(target.dtype)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.add_((0.3 if "norm" in name else 0.1) * torch.randn_like(parameter))
    return drafter


@pytest.fixture(params=[{}, {"causal": True}, {"layers": [1, 2, 4, 6], "num_layers": 3}], ids=str)
def drafter(request, target) -> DFlash:
    return build(target, **request.param)
