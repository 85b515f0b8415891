"""Drafters that are served with weights of few bits: what their linear layers compute, in training and in decoding.

O / I = output / input features, G = scales of a row, N = tokens.

A drafter keeps its weights as they are trained, the masters, and computes with what they are rounded to. After training
this costs some acceptance; training with it (fake quantization, 1712.05877) lets the weights find better places: the
gradient passes as if nothing had been rounded (straight through, 1308.3432). What is saved are the masters and the name
of the scheme; an engine's files hold the codes and scales that ``quantize_weight`` gives, in every case.

The projection to the vocabulary and embeddings are not rounded: engines share or fuse them, and errors there are not
mended by a later layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.onednn import packed

_TINY = 1e-12  # the scale of what is zero everywhere
_NEIGHBORS = 6  # numbers to try for the largest weight of a group, which scale and code leave a few of


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers, as serving engines compute with them. bits: of a weight's codes. group: neighbors in a row
    that share a scale; None: all of it. input_bits: of every token's input, with its own scale; None: not rounded."""

    bits: int
    group: int | None = None
    input_bits: int | None = None


SCHEMES = {"int8": Scheme(8, input_bits=8), "int4": Scheme(4, group=32)}


def find_scheme(name: str) -> Scheme:
    """The scheme of that name. Raises UserError if there is none."""
    if name not in SCHEMES:
        raise UserError(f"quantize is {name!r}: expected {', '.join(SCHEMES)}, or null for weights as they are trained")
    return SCHEMES[name]


def quantize_weight(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Of a floating-point ``[O, I]`` its codes, int8 ``[O, I]``, and scales ``[O, G]``: in fp32 where integers are
    multiplied, as those kernels have them, else of the weight's dtype."""
    groups = weight.detach().float().unflatten(1, (-1, scheme.group or weight.shape[1]))  # [O, G, I / G]
    # Half of the codes' range, as compressed-tensors has it: the largest weight is clipped by at most half a step.
    scales = (groups.abs().amax(-1) / (2**scheme.bits / 2 - 0.5)).clamp_min(_TINY)  # [O, G]
    scales = scales if scheme.input_bits else scales.to(weight.dtype)
    limit = 2 ** (scheme.bits - 1)
    codes = (groups / scales.float()[..., None]).round().clamp(-limit, limit - 1)
    return codes.flatten(1).to(torch.int8), scales


def dequantize_weight(codes: Tensor, scales: Tensor) -> Tensor:
    """The weight ``[O, I]``, fp32, that codes ``[O, I]`` and scales ``[O, G]`` stand for."""
    groups = codes.float().unflatten(1, (scales.shape[1], -1))
    return (groups * scales.float()[..., None]).flatten(1)


def restore_weight(codes: Tensor, scales: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """The inverse: a weight ``[O, I]`` of ``dtype`` that ``quantize_weight`` makes exactly these codes ``[O, I]`` and
    scales ``[O, G]`` of, if it has made them of any of that dtype. ``dequantize_weight`` is none: a scale is that of a
    largest weight half a step behind the last code, so what they stand for has other scales. There it is put here."""
    limit = 2 ** (scheme.bits - 1)
    grouped = codes.unflatten(1, (scales.shape[1], -1))  # [O, G, I / G]
    last = (grouped == limit - 1) | (grouped == -limit)
    # Where none has it, the largest weight is negative, and its quotient was rounded to just before the half.
    last = torch.where(last.any(-1, keepdim=True), last, grouped == 1 - limit)
    weight = dequantize_weight(codes, scales).to(dtype).view_as(grouped)
    largest = (scales.float() * (limit - 0.5)).to(dtype)  # [O, G]
    for _ in range(_NEIGHBORS):
        weight = torch.where(last, largest[..., None] * grouped.sign(), weight)
        found, measured = quantize_weight(weight.flatten(1), scheme)
        beyond = (found.view_as(grouped).float().abs() - grouped.float().abs()).sum(-1)
        off = torch.where(measured == scales, beyond, measured.float() - scales.float())  # [O, G]
        if not off.any():
            break
        toward = torch.where(off > 0, 0.0, torch.inf).to(dtype)
        largest = torch.where(off == 0, largest, torch.nextafter(largest, toward))
    return weight.flatten(1)


def round_weight(weight: Tensor, scheme: Scheme) -> Tensor:
    """What a quantized engine computes with in the place of ``weight [O, I]``; of its dtype."""
    return dequantize_weight(*quantize_weight(weight, scheme)).to(weight.dtype)


def round_input(given: Tensor, scheme: Scheme) -> Tensor:
    """What becomes of a layer's input ``[..., I]``, if the scheme rounds it: the largest number of each token is the
    largest code, as vLLM's kernels have it. Of the input's dtype."""
    if scheme.input_bits is None:
        return given
    codes, scales = _quantize_input(given.detach(), scheme)
    return (codes * scales).to(given.dtype)


def _quantize_input(given: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Codes ``[..., I]`` and scales ``[..., 1]``, both fp32."""
    values = given.float()
    scales = (values.abs().amax(-1, keepdim=True) / (2 ** (scheme.input_bits - 1) - 1)).clamp_min(_TINY)  # type: ignore[operator]
    return (values / scales).round(), scales


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` that computes with its weight, and maybe its input, rounded. The parameters are those of the plain
    layer, by the same names, so that optimizers, ZeRO's hooks and state dicts see no difference."""

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        """In the place of ``linear``, whose parameters it takes. Raises UserError if they cannot be grouped."""
        nn.Module.__init__(self)
        if scheme.group is not None and linear.in_features % scheme.group:
            wrong = f"a layer of the drafter reads {linear.in_features} features, which cannot be quantized in groups"
            raise UserError(f"{wrong}: expected a multiple of {scheme.group}; choose other sizes, or quantize=int8")
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, given: Tensor) -> Tensor:
        """``[..., I]`` -> ``[..., O]``."""
        weight = _straight_through(self.weight, round_weight, self.scheme)
        return nn.functional.linear(_straight_through(given, round_input, self.scheme), weight, self.bias)

    def settled(self) -> nn.Module:
        """A layer of the same outputs, up to the rounding of sums, that has rounded its weight once and for all."""
        if _multiplies_integers(self.weight, self.scheme):
            return IntegerLinear(self)
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(round_weight(self.weight, self.scheme), requires_grad=False)
        linear.bias = self.bias
        return linear if self.scheme.input_bits is None else RoundedInput(linear, self.scheme)


class IntegerLinear(nn.Module):
    """A linear layer of 8 bits in the place of ``linear``, whose ``weight`` stays the masters': integers are multiplied
    and summed exactly, as engines do it, and a code is a quarter of what fp32 reads."""

    def __init__(self, linear: QuantizedLinear) -> None:
        super().__init__()
        self.codes, self.scales = quantize_weight(linear.weight, linear.scheme)  # [O, I], [O, 1]
        self.weight, self.bias, self.scheme = linear.weight, linear.bias, linear.scheme

    def forward(self, given: Tensor) -> Tensor:
        """``[..., I]`` -> ``[..., O]``."""
        codes, scales = _quantize_input(given.flatten(0, -2), self.scheme)  # [N, I], [N, 1]
        product = torch._int_mm(codes.to(torch.int8), self.codes.T) * scales * self.scales.T  # [N, O]
        product = product if self.bias is None else product + self.bias
        return product.to(given.dtype).unflatten(0, given.shape[:-1])


def _multiplies_integers(weight: Tensor, scheme: Scheme) -> bool:
    """Whether both factors have 8 bits on a processor that sums their products in 32; others may saturate, or are
    slower than in fp32."""
    return scheme.input_bits == scheme.bits == 8 and weight.device.type == "cpu" and torch.cpu._is_vnni_supported()


class RoundedInput(nn.Module):
    """A linear layer whose input is rounded before it."""

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.linear, self.scheme = linear, scheme

    @property
    def weight(self) -> Tensor:
        """Of the layer."""
        return self.linear.weight

    def forward(self, given: Tensor) -> Tensor:
        """``[..., I]`` -> ``[..., O]``."""
        return self.linear(round_input(given, self.scheme))


def quantize(drafter: Drafter, name: str | None) -> None:
    """Let the drafter compute, from now on, with weights in the scheme of that name; None leaves it as it is. Raises
    UserError for an unknown scheme, a drafter whose quantized weights no engine reads, and adapters beside weights."""
    if name is None:
        return
    scheme = find_scheme(name)
    if not drafter.quantizable:
        wrong = f"quantize={name} is not for the drafter {drafter.family}, of which engines read no quantized weights"
        raise UserError(f"{wrong}: expected eagle3 or a draft model; set quantize=null")
    if drafter.served() is not drafter:
        wrong = f"quantize={name} cannot round weights that adapters are still to be added to"
        raise UserError(f"{wrong}: expected a drafter without lora; train it first, then export with quantize={name}")
    for parent in list(drafter.modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) is nn.Linear:  # not the projection to the vocabulary, which is a DraftHead
                setattr(parent, child_name, QuantizedLinear(child, scheme))
    drafter.quantization = name


@contextmanager
def ready_to_decode(drafter: Drafter) -> Iterator[None]:
    """Inside, the drafter decodes with weights that are rounded once, and packed where oneDNN computes; those of 8 bits
    on a processor with VNNI are integers."""
    layers = [
        (parent, name, child)
        for parent in drafter.modules()
        for name, child in parent.named_children()
        if isinstance(child, QuantizedLinear)
    ]
    for parent, name, layer in layers:
        setattr(parent, name, layer.settled())
    try:
        with packed(drafter):
            yield
    finally:
        for parent, name, layer in layers:
            setattr(parent, name, layer)


def _straight_through(values: Tensor, rounded: Callable[[Tensor, Scheme], Tensor], scheme: Scheme) -> Tensor:
    """Exactly the rounded values, with the gradient of the values themselves."""
    if not (torch.is_grad_enabled() and values.requires_grad):
        return rounded(values, scheme)
    return rounded(values, scheme).detach() + (values - values.detach())
