"""An EAGLE head's layer, compiled while it trains.

One graph without a break for each of the first steps and one for all later ones, whatever the number of positions:
attention to packed documents is an operator of its own, and nothing in the layer asks for a value."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config

from specdraft.drafters.base import Drafter
from specdraft.drafters.eagle.forward import Attends
from specdraft.errors import warn

T = TypeVar("T")


def run_layer(
    drafter: Drafter, layer: Callable[[Tensor, Tensor, Attends], T], embedded: Tensor, feature: Tensor, attends: Attends
) -> T:
    """What ``layer`` makes of its arguments, compiled where the drafter is to be and gradients are wanted. A layer that
    cannot be compiled runs as it is, from then on, with a line that says so."""
    asked = feature if isinstance(attends[-1].queries, slice) else attends[-1].queries
    # A single query would be a graph of its own; ZeRO-3 gathers weights in hooks, which no graph can hold.
    if drafter.compiled and torch.is_grad_enabled() and len(asked) > 1 and not _partitioned(drafter):
        try:
            # Otherwise a failure to compile the backward pass would only show in it.
            with config.patch(force_non_lazy_backward_lowering=True):
                return torch.compile(layer, fullgraph=True, dynamic=True)(embedded, feature, attends)
        except TorchDynamoException as error:
            drafter.compiled = False
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            warn(f"the head's layer cannot be compiled and runs as it is, as compile=false asks for: {reason}")
    return layer(embedded, feature, attends)


def _partitioned(module: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())
