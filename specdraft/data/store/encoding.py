"""How hidden states are kept: fp32, bf16, or fp8 with a scale per vector.

H = hidden size. A vector is one layer's hidden state at one token. Its own scale lets fp8 (e4m3, 3 bits of mantissa)
keep vectors whose norms differ by orders of magnitude, as those of a sentence's first token and the others do."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Encoded(NamedTuple):
    """codes: ``[..., H]``. scale: ``[...]`` fp32 to multiply them with, None unless they are fp8."""

    codes: Tensor
    scale: Tensor | None


def find_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises UserError for one that no store has."""
    if name not in DTYPES:
        raise UserError(f"the store's dtype is {name!r}: expected {', '.join(DTYPES)}")
    return DTYPES[name]


def bytes_per_vector(name: str, hidden_size: int) -> int:
    """Bytes of an encoded vector, its scale included."""
    return hidden_size * find_dtype(name).itemsize + (4 if name == "float8" else 0)


def encode(values: Tensor, name: str) -> Encoded:
    """``values [..., H]`` in the dtype of that name."""
    dtype = find_dtype(name)
    if name != "float8":
        return Encoded(values.to(dtype), None)
    values = values.float()
    largest = values.abs().amax(-1)
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    # Division may round the largest value to a hair above what fp8 can hold, which torch would make NaN.
    return Encoded((values / scale[..., None]).clamp(-_LARGEST, _LARGEST).to(dtype), scale)


def decode(encoded: Encoded, dtype: torch.dtype) -> Tensor:
    """The values ``[..., H]`` in ``dtype``."""
    if encoded.scale is None:
        return encoded.codes.to(dtype)
    return from_fp8(encoded.codes).mul_(encoded.scale[..., None]).to(dtype)


def from_fp8(codes: Tensor) -> Tensor:
    """Finite e4m3 numbers in fp32, five times as fast on a CPU as torch's own conversion.
    Moved up by 7 bits, exponent and mantissa are those of an fp16 number 2^8 times smaller; the byte's sign reaches bit
    15 by sign extension, and its copy in bit 14 is cleared."""
    moved = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return moved.view(torch.float16).float().mul_(2**8)


def squared_error(values: Tensor, encoded: Encoded) -> tuple[float, float]:
    """(sum of squared errors, sum of squares) of the ``values``: their ratio's root is the relative error."""
    exact = values.float()
    difference = decode(encoded, torch.float32) - exact
    return torch.linalg.vector_norm(difference).item() ** 2, torch.linalg.vector_norm(exact).item() ** 2
