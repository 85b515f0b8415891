"""Tensors of modules and files.

Of safetensors from outside nothing is executed, nothing is followed out of its folder, nothing is believed unread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from specdraft.errors import UserError
from specdraft.text import reason


class Kind(NamedTuple):
    """What a tensor is before it is read."""

    shape: tuple[int, ...]
    is_floating_point: bool


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which stay on disk until they are used. Raises UserError if it is damaged."""
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises its own kind, the system's and those of the dtypes' lookup
        raise _damaged(path, error) from error


def read_kinds(path: Path) -> dict[str, Kind]:
    """What the tensors of a safetensors file are, from its header. Raises UserError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            return {
                name: Kind(tuple(part.get_shape()), part.get_dtype().startswith(("F", "BF")))
                for name, part in slices.items()
            }
    except Exception as error:
        raise _damaged(path, error) from error


def kinds(tensors: dict[str, Tensor]) -> dict[str, Kind]:
    """What tensors are, on whatever device."""
    return {name: Kind(tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}


def difference(expected: dict[str, Kind], found: dict[str, Kind]) -> str | None:
    """The first tensor that is not as expected, in words; None if all are."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unknown"
        if found[name] != expected[name]:
            return f"{name} is {_shown(found[name])}, by the configuration {_shown(expected[name])}"
    return None


def _shown(kind: Kind) -> str:
    return f"{list(kind.shape)} of {'floats' if kind.is_floating_point else 'integers'}"


@contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Whatever dtype the parameters are cast to inside, floating-point buffers are moved alone.

    They hold rotary frequencies, which ``from_pretrained`` keeps in float32, as engines do: rounded to bfloat16 they
    turn position 1,000 by another angle than the one that was trained.
    """
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


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({reason(error)}): expected a safetensors file; restore it or write it anew")
