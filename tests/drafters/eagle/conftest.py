"""Heads of all variants."""

import pytest
import torch

from specdraft.drafters.eagle import Eagle3
from tests.drafters.eagle.variants import STEPS, VARIANTS


@pytest.fixture(params=VARIANTS)
def head(request, target):
    kind, options = VARIANTS[request.param]
    torch.manual_seed(0)
    vocabulary = torch.arange(3, 97, 2) if issubclass(kind, Eagle3) else None
    head = kind.for_target(target, vocabulary, ttt_steps=STEPS, **options).double()
    with torch.no_grad():  # large random weights: every part of the head must matter
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head
