"""Passes compiled whole, where the device waits for the host: eager code stays, as what compiled code is compared with.

A pass of few tokens is hundreds of short operations, and launching them takes longer than computing: on a GPU by far,
on a CPU about half of the time. Compiled they are one call, on CUDA a graph that is replayed."""

import copy
import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from specdraft.errors import UserError
from specdraft.text import reason

_GRAPHS = 64  # that one function may be compiled to: by width of the pass, requests side by side, and auxiliary layers
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}  # beside values of one; others 2e-2
BACKEND = "inductor"
_active: ContextVar[bool] = ContextVar("compiling", default=False)


class _Spent(threading.local):
    seconds = 0.0


_spent = _Spent()


def wanted(setting: bool | str, device: torch.device) -> bool:
    """Whether to compile: ``auto`` is on CUDA. Raises UserError for another setting."""
    if setting not in (True, False, "auto"):
        raise UserError(f"decoding.compile is {setting!r}: expected auto, true or false")
    return device.type == "cuda" if setting == "auto" else bool(setting)


@contextmanager
def compiling(active: bool) -> Iterator[None]:
    """Inside, what is ``Compilable`` is compiled."""
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


def is_active() -> bool:
    """Whether passes are to be compiled."""
    return _active.get()


def seconds_spent() -> float:
    """Seconds that this thread has spent so far on compiling, and on comparing what was compiled with eager code: they
    come once, and are no part of how long decoding takes."""
    return _spent.seconds


class Compilable:
    """A function of tensors, and of what they are read from, that gives a tensor or several. Compiled, each new width
    of a pass, and each new graph, is computed both ways once; where that fails or differs, the function stays eager,
    with one warning."""

    def __init__(
        self,
        function: Callable[..., Any],
        what: str,
        prepare: Callable[[], object] = lambda: None,
        frozen: bool = False,
    ) -> None:
        """``what`` is named in the warning; ``prepare`` is called once before anything is compiled. ``frozen``: the
        modules that the function calls stay what they are, values of weights aside. A call then does not ask each of
        them, which takes some hundredths of a small target's step."""
        self.function, self.what, self.prepare, self.frozen = function, what, prepare, frozen
        self._compiled: Callable[..., Any] | None = None
        self._checked: set[int] = set()
        self._amiss = False

    def __call__(self, width: int, *arguments: Any) -> Any:
        """The function of these arguments, a pass of that many tokens a request. Called twice, it gives the same."""
        if not _active.get() or self._amiss:
            return self.function(*arguments)
        graphs, started = _graphs(), time.perf_counter()
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        try:
            if self._compiled is None:
                self.prepare()
                self._compiled = _compile(self.function, tensors[0].device, self.frozen)
            for each in tensors:  # a CUDA graph has one width; on a CPU a graph of its own would save up to 6 %
                if each.is_cuda and each.ndim > 1 and each.shape[1] == width:
                    torch._dynamo.mark_static(each, 1)
            found = self._compiled(*arguments)
            if width in self._checked and _graphs() == graphs:
                return found
            amiss = _difference(self.function(*arguments), found)
        except Exception as error:  # of whatever the compiler is made of
            amiss = f"the compiler says: {reason(error)}"
        if amiss:
            self._amiss = True
            warnings.warn(f"{self.what} is decoded with uncompiled, slower ({amiss})", stacklevel=2)
        self._checked.add(width)
        _spent.seconds += time.perf_counter() - started
        return self(width, *arguments)  # for what it takes from now on

    def __deepcopy__(self, memo: dict[int, Any]) -> "Compilable":
        # The copies' functions are methods of copies.
        function, prepare = copy.deepcopy(self.function, memo), copy.deepcopy(self.prepare, memo)
        return Compilable(function, self.what, prepare, self.frozen)


def _compile(function: Callable[..., Any], device: torch.device, frozen: bool) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.specialize_float = True  # all are constants of modules; as unknowns they are traced twice
    on_cuda = device.type == "cuda"
    options: dict[str, Any] = {}
    if BACKEND == "inductor":
        # CUDA graphs, or calls between operations that do not go through Python.
        options["triton.cudagraphs" if on_cuda else "cpp_wrapper"] = True
    apart: dict[str, Any] = {}
    if frozen and "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # from torch 2.13 on
        options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        apart["isolate_recompiles"] = True  # or one model's graph would be taken for another's
    # Texts of all lengths and passes of all widths at once on a CPU: to find out by the second one compiles twice.
    dynamic = None if on_cuda else True
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=BACKEND, options=options or None, **apart)


def _graphs() -> int:
    """How many were made in this process: one more after a call that had to compile, be it for a longer cache."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """What differs, as words; nothing if the two are the same up to rounding."""
    for one, other in zip(expected, found, strict=True):
        if not one.numel():
            continue
        largest = max(1.0, one.abs().max().item())
        if not (one - other).abs().max().item() < _TOLERANCE.get(one.dtype, 2e-2) * largest:
            return f"it differs from eager by {(one - other).abs().max().item():.2g}"
    return ""
