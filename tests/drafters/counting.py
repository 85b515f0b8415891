"""Floating-point operations as torch dispatches them."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import specdraft.drafters.causal_attention  # noqa: F401  # its operators are counted


def _linear_flops(given: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * given.numel() * len(weight)


def _causal_flops(query: Any, key: Any, value: Any, table: Any, *_: Any, **__: Any) -> int:
    asked, positions = table.diff().tolist()
    pairs = sum(n * (2 * length - n + 1) // 2 for n, length in zip(asked, positions, strict=True))
    return 4 * pairs * query.shape[1] * query.shape[2]


def _causal_backward_flops(
    grad: Any, query: Any, key: Any, value: Any, output: Any, lse: Any, *rest: Any, **_: Any
) -> int:
    return 2 * _causal_flops(query, key, value, *rest)  # its products are made again: not counted


_FORMULAS = {
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.mkldnn._linear_pointwise: _linear_flops,
    torch.ops.specdraft.causal_attention: _causal_flops,
    torch.ops.specdraft.causal_attention_backward: _causal_backward_flops,
}


class CountedFlops(TorchDispatchMode):
    """``count``: FLOPs of all matrix products while it is entered, by operator. Unlike torch's own counter it looks at
    no module, which ``torch.autograd.grad`` inside a forward does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.count[func._overloadpacket.__name__] += formula(*args, **(kwargs or {}), out_val=out)
        return out
