"""Products on a CPU by oneDNN, in fp32 too, for which torch asks another library; and linear layers packed for it once.

torch's own product of six rows takes three times as long as that of one, so that verifying a draft would cost as much
as it saves; and on the AMD processor with AVX-512 that was measured its large products take twice as long.
A small weight is another matter: oneDNN's product of it takes longer to begin than torch's product to end. Which is
small is told by its size and never by trying: a busy machine would choose otherwise, and round otherwise. On AMD's
processors with AVX2 alone compiled passes take torch's product of it and a few rows from the other side.

I / O = input / output features."""

import copy
import itertools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# A product of a number of rows that oneDNN has not met is prepared first, which takes half a millisecond. It keeps two
# entries of each, 1,024 in all unless told otherwise before the first product: too few for drafts of changing lengths
# of up to 16 requests. A product keeps about 0.6 MB, so that many may take 1.2 GB.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")

_SMALL = 2**18  # elements of an fp32 weight whose product by torch is over before oneDNN's has begun
_LARGE = 2**27  # multiplications of a product that takes so long that preparing it for oneDNN does not matter


class PackedLinear(nn.Linear):
    """``nn.Linear`` with its weight in the blocks that oneDNN reads: ``weight`` is one opaque tensor of the same size,
    which takes the place of the plain one. It is frozen; gradients pass through to the input. Its state dict is that
    of the plain layer."""

    def __init__(self, linear: nn.Linear) -> None:
        """Of a layer on a CPU, which stays as it is."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), linear.bias
        self.number = next(_numbers)
        _layers[self.number] = self

    def forward(self, given: Tensor) -> Tensor:
        """``[..., I]`` -> ``[..., O]``, also of what autocast has made of the input."""
        if given.dtype != self.weight.dtype and torch.is_autocast_enabled("cpu"):
            given = given.to(self.weight.dtype)
        if torch.compiler.is_compiling():
            return torch.ops.specdraft.packed_linear(given, self.number, self.out_features, self.bias)
        if torch.is_grad_enabled() and given.requires_grad:
            return _Product.apply(given, self.weight, self.bias)
        return _product(given, self.weight, self.bias)

    def unpacked(self) -> nn.Linear:
        """The plain layer."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight, linear.bias = nn.Parameter(plain(self.weight), requires_grad=False), self.bias
        return linear

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        return PackedLinear(copy.deepcopy(self.unpacked(), memo))  # torch copies no opaque tensor

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = plain(self.weight)


# A compiled graph can hold no opaque tensor, so that it names the layer instead.
_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, PackedLinear] = weakref.WeakValueDictionary()
_library = torch.library.Library("specdraft", "DEF")
_library.define("packed_linear(Tensor given, int layer, int size, Tensor? bias) -> Tensor")
_library.impl("packed_linear", lambda given, layer, size, bias: _product(given, _layers[layer].weight, bias), "CPU")
_library.impl("packed_linear", lambda given, layer, size, bias: given.new_empty((*given.shape[:-1], size)), "Meta")


class _Product(torch.autograd.Function):
    """The operator has no derivative of its own, and would pass no gradient on without a word."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _product(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ plain(ctx.weight), None, None


class FewRowsLinear(nn.Linear):
    """``nn.Linear`` with a small weight that in a compiled pass of a request's 2 to 8 tokens multiplies the weight by
    them, which torch's library then reads once. Uncompiled the operations around it would cost what that saves."""

    decodes_as_linear = True

    def forward(self, input: Tensor) -> Tensor:
        """``[..., I]`` -> ``[..., O]``."""
        alone = input.ndim == 3 and input.shape[0] == 1  # of several requests a graph would ask for the number
        if not (torch.compiler.is_compiling() and alone and 2 <= input.shape[1] <= 8):
            return super().forward(input)
        product = torch.mm(self.weight, input[0].t()).t()[None]
        return product if self.bias is None else product + self.bias


class LearnedLinear(nn.Linear):
    """``nn.Linear`` that learns on a CPU: large products of it, forward and backward, are oneDNN's. It holds what the
    plain layer holds."""

    decodes_as_linear = True

    def forward(self, input: Tensor) -> Tensor:
        """``[..., I]`` -> ``[..., O]``."""
        large = input.numel() * self.out_features >= _LARGE and torch.is_grad_enabled()
        apart = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()  # these choose by themselves
        if apart or not (large and input.dtype == self.weight.dtype and _native(input)):
            return super().forward(input)
        return _LearnedProduct.apply(input, self.weight, self.bias)


class _LearnedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(given, weight)
        return _product(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        given, weight = ctx.saved_tensors
        of_given, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)  # [n, O]
        return (
            _product(gradient, weight.T, None) if of_given else None,
            _product(rows.T, given.flatten(0, -2).T, None) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


@contextmanager
def learning(module: nn.Module) -> Iterator[None]:
    """Inside, plain linear layers of the module that learn in fp32 on a CPU are ``LearnedLinear``, where faster."""
    layers = [
        each
        for each in module.modules()
        if type(each) is nn.Linear and each.weight.requires_grad and each.weight.dtype == torch.float32
    ]
    layers = layers if is_faster() else []
    for layer in layers:
        layer.__class__ = LearnedLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


@cache
def is_faster() -> bool:
    """Whether oneDNN's large products in fp32 take less time than torch's: half on AMD's processors with AVX-512, which
    torch's library does not use there (benchmarks/onednn.py); with AVX2 alone they take longer. Told by what the
    processor says of itself and not by trying, as a resumed training must compute as before."""
    processor = _processor()
    return "AuthenticAMD" in processor and " avx512f" in processor and torch.backends.mkldnn.is_available()


@cache
def reads_few_rows_slowly() -> bool:
    """Whether torch's product of 2 to 8 rows reads a small weight several times: on AMD's processors with AVX2 alone
    four rows take up to three times as long as one, and no longer with the weight first (docs/benchmarks.md)."""
    processor = _processor()
    return "AuthenticAMD" in processor and " avx2" in processor and " avx512f" not in processor


def _processor() -> str:
    """What it says of itself; nothing where that cannot be read."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return ""


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of ``a [n, K]`` and ``b [m, K]``, without a gradient. Of an fp32 ``b`` by columns, torch's library
    takes less time, unless it does not know the processor."""
    by_columns = b.dtype == torch.float32 and not b.is_contiguous() and not is_faster()
    ours = a.dtype == b.dtype and _native(a) and not by_columns
    return _product(a, b, None) if ours else torch.nn.functional.linear(a, b)


def _product(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(given, weight, bias, "none", [], "")


def _native(tensor: Tensor) -> bool:
    """Whether oneDNN computes with it, on a CPU, in a dtype that the processor does not emulate. A tensor of another
    class, as torchao's quantized ones, computes by itself."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    native = tensor.dtype == torch.float32
    native |= tensor.dtype == torch.bfloat16 and not emulates_bfloat16(tensor.device)
    return tensor.device.type == "cpu" and native and torch.backends.mkldnn.is_available()


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether the device is a processor without instructions for bfloat16: products in it take 50 times as long as in
    float32 there."""
    there = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cpu" and not there


def plain(weight: Tensor) -> Tensor:
    """A weight ``[O, I]`` as an ordinary tensor: itself, or a copy of a packed one."""
    return weight.to_dense() if weight.is_mkldnn else weight


def pack(module: nn.Module) -> None:
    """Pack the linear layers inside a frozen module that are faster so, one after the other, so that beyond what it
    takes no more than one layer is held twice; a weight that others share (a tied embedding) stays and costs its size
    again."""
    for parent, name in [place[:2] for place in _linear_layers(module)]:
        setattr(parent, name, PackedLinear(getattr(parent, name)))
    for small in _small_layers(module):
        small.__class__ = FewRowsLinear


def unpack(module: nn.Module) -> None:
    """Undo ``pack``."""
    for parent in module.modules():
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.unpacked())
    few: list[nn.Linear] = [each for each in module.modules() if isinstance(each, FewRowsLinear)]
    for small in few:
        small.__class__ = nn.Linear


@contextmanager
def packed(module: nn.Module) -> Iterator[None]:
    """Inside, the module computes with packed copies of its linear layers, which cost their size again."""
    layers, small = list(_linear_layers(module)), list(_small_layers(module))
    for parent, name, linear in layers:
        setattr(parent, name, PackedLinear(linear))
    for each in small:
        each.__class__ = FewRowsLinear
    try:
        yield
    finally:
        for parent, name, linear in layers:
            setattr(parent, name, linear)
        for each in small:
            each.__class__ = nn.Linear


def _small_layers(module: nn.Module) -> list[nn.Linear]:
    """Plain linear layers that are not worth packing, where a few rows of them are slow."""
    layers = [each for each in module.modules() if type(each) is nn.Linear] if reads_few_rows_slowly() else []
    few = [each for each in layers if 0 < each.weight.numel() <= _SMALL]  # ZeRO-3 leaves an empty weight
    return [each for each in few if each.weight.dtype == torch.float32 and each.weight.device.type == "cpu"]


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of those that oneDNN can compute with, without small ones. ZeRO-3 leaves of a sharded one
    an empty weight, and a subclass with a ``forward`` of its own (a router, say) is packed only if it says
    ``decodes_as_linear``."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if not isinstance(child, nn.Linear) or isinstance(child, PackedLinear):
                continue
            own = type(child).forward is not nn.Linear.forward and not getattr(child, "decodes_as_linear", False)
            if own or not child.weight.numel() or not _native(child.weight):
                continue
            # In bfloat16 torch asks oneDNN too, which then has the blocks to make besides.
            if child.weight.numel() > _SMALL or child.weight.dtype == torch.bfloat16:
                yield parent, name, child
