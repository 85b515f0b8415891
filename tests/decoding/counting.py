"""What launching costs: operations that torch dispatches, and reads and writes for which the host and a device wait."""

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class CountedDispatches(TorchDispatchMode):
    """``count``: operations, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class CountedSyncs(TorchFunctionMode):
    """``count``: calls, by name, for which a GPU would have to be waited for: numbers that are read, tensors that are
    made of numbers, and results whose shapes depend on values."""

    READS = ("item", "tolist", "__int__", "__bool__", "__float__", "__index__", "cpu", "numpy", "__array__")
    WRITES = ("tensor", "as_tensor", "from_numpy")
    SHAPES = ("nonzero", "unique", "masked_select", "argwhere", "bincount", "repeat_interleave_tensor")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in (*self.READS, *self.WRITES, *self.SHAPES):
            self.count[name] += 1
        if name in ("__getitem__", "__setitem__") and _by_mask(args[1]):
            self.count[f"{name} by mask"] += 1
        return func(*args, **(kwargs or {}))


def _by_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)
