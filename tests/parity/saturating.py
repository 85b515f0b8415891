"""How oneDNN multiplies 8-bit integers on a processor without VNNI, which vLLM's int8 drafters compute with there.

Inputs are shifted to 0..255, and the products of two neighbors are added in 16 bits (``vpmaddubsw``), where what is
above 32,767 becomes that: large inputs that meet two large weights of one sign lose part of their product. Processors
with VNNI, and GPUs, add in 32 bits and lose nothing, as our own decoder computes.

N = tokens, O / I = output / input features."""

from pathlib import Path

import torch
from torch import Tensor, nn

from specdraft.drafters.base import Drafter
from specdraft.drafters.quantization import QuantizedLinear, quantize_weight

_SHIFT, _LEAST, _MOST = 128, -32768, 32767


def multiplies_exactly() -> bool:
    """Whether this processor has VNNI, for AVX2 or AVX-512."""
    return "vnni" in Path("/proc/cpuinfo").read_text()


def saturate(drafter: Drafter) -> None:
    """Let a drafter in int8 multiply as a processor without VNNI does."""
    for parent in list(drafter.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedLinear):
                setattr(parent, name, SaturatingLinear(child))


class SaturatingLinear(nn.Module):
    """In the place of ``linear``, which rounds inputs to 8 bits."""

    def __init__(self, linear: QuantizedLinear) -> None:
        super().__init__()
        assert linear.scheme.input_bits == 8
        self.weight, self.bias = linear.weight, linear.bias
        codes, self.scales = quantize_weight(linear.weight, linear.scheme)  # [O, I], [O, 1]
        self.codes = codes.int()

    def forward(self, given: Tensor) -> Tensor:
        """``[..., I]`` -> ``[..., O]``."""
        rows = given.flatten(0, -2)  # [N, I]
        scales = rows.abs().amax(-1, keepdim=True) / 127  # [N, 1]
        codes = (rows / scales).round().int()
        sums = saturated_product(codes, self.codes).float()  # [N, O]
        product = sums * scales * self.scales.T
        return (product if self.bias is None else product + self.bias).unflatten(0, given.shape[:-1])


def saturated_product(inputs: Tensor, weights: Tensor) -> Tensor:
    """Of codes ``[N, I]`` and ``[O, I]``, int32, the sums ``[N, O]``."""
    shifted, even, odd = inputs + _SHIFT, weights[:, ::2].contiguous(), weights[:, 1::2].contiguous()
    rows = [(even * row[::2] + odd * row[1::2]).clamp_(_LEAST, _MOST).sum(-1) for row in shifted]  # [O] each
    return torch.stack(rows) - _SHIFT * weights.sum(-1)
