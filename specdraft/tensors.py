"""Tensors of modules and files. Safetensors from outside are neither executed nor believed before they are read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from specdraft.errors import UserError
from specdraft.text import reason


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which stay on disk until they are used. Raises UserError if it is damaged."""
    with _readable(path):
        return load_file(path)


def read_kinds(path: Path) -> dict[str, str]:
    """As ``kinds``, from the header of a safetensors file. Raises UserError if it is damaged."""
    with _readable(path), safe_open(path, framework="pt") as file:
        slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118  (not a mapping)
        return {name: _kind(part.get_shape(), part.get_dtype().startswith(("F", "BF"))) for name, part in slices}


def is_quantized(tensor: Tensor) -> bool:
    """Whether it is one of torchao's, whose class computes with integers and knows few other operations."""
    return type(tensor).__module__.startswith("torchao.")


def dequantized(tensor: Tensor) -> Tensor:
    """The values of a tensor as an ordinary one."""
    return tensor.dequantize() if is_quantized(tensor) else tensor


def kinds(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Shape and kind of each tensor, such as "[2, 3] of floats", on any device."""
    return {name: _kind(tensor.shape, tensor.is_floating_point()) for name, tensor in tensors.items()}


def difference(expected: dict[str, str], found: dict[str, str]) -> str | None:
    """The first tensor that is not as expected, in words; None if all are."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unknown"
        if found[name] != expected[name]:
            return f"{name} is {found[name]}, by the configuration {expected[name]}"
    return None


def _kind(shape: Sequence[int], is_floating_point: bool) -> str:
    return f"{list(shape)} of {'floats' if is_floating_point else 'integers'}"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors raises its own kind, the system's and those of the dtypes' lookup
        mend = "expected a safetensors file; restore it or write it again"
        raise UserError(f"{path} is damaged ({reason(error, 200)}): {mend}") from error


@contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Inside, casts of the parameters move floating-point buffers to their device and leave their dtype as it is.
    They hold rotary frequencies, which ``from_pretrained`` and engines keep in float32: rounded to bfloat16, the angle
    at position 1,000 is another than in training."""
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]
    yield
    for owner, name, buffer in buffers:
        cast = owner._buffers[name]
        assert cast is not None
        if cast.dtype != buffer.dtype:
            owner._buffers[name] = buffer.to(cast.device)
