"""Adapters that are no longer as they begin, so that every mistake shows."""

from typing import Any

import torch

from specdraft.drafters.jacobi_forcing import JacobiForcing
from specdraft.targets import Target

SMALL: dict[str, Any] = {"rank": 3, "alpha": 6, "block_size": 4, "noise_steps": 3}


def trained(target: Target, seed: int = 0, **options: Any) -> JacobiForcing:
    """In the target's dtype."""
    drafter = JacobiForcing.for_target(target, **SMALL | options).to(target.dtype).eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
    return drafter
