"""What a loss costs, whatever the device: operations, bytes that they read and write, and reads by the host."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = {"index", "index_select", "gather"}  # they read no more than they write
_EMPTY = {"empty", "empty_like", "new_empty"}
_READS = {"tolist", "item", "cpu", "numpy", "nonzero", "argwhere", "unique", "masked_select", "tensor", "as_tensor"}
_READS |= {f"__{name}__" for name in ("bool", "int", "float", "index", "contains", "array")}


def size(tensor: torch.Tensor) -> int:
    """Bytes in memory: what is expanded is there once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride or not length else 1
    return count * tensor.element_size()


class Counted(TorchDispatchMode):
    """``operations`` that are no views, and the ``bytes`` of their operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, aliases = func._overloadpacket.__name__, [r.alias_info for r in func._schema.returns]
        if name in _EMPTY or any(alias and not alias.is_write for alias in aliases):
            return out
        self.operations += 1
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        given = {id(x) for x in tensors if x is not kwargs.get("out")}
        results = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        read = [x for x in tensors if id(x) in given]
        if name in _GATHERS:
            read = [*results, *read[1:]]
        if name in {"copy_", "fill_", "zero_"} or name.startswith("new_") or name.endswith("_like"):
            read = read[1:]
        self.bytes += sum(map(size, read)) + sum(map(size, results))
        return out


class HostReads(TorchFunctionMode):
    """``seen``: calls that wait for the device, or copy a Python list to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        key = args[1] if name in {"__getitem__", "__setitem__"} else None
        if name in _READS or (isinstance(key, torch.Tensor) and key.dtype == torch.bool):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
