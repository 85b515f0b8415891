"""What a published directory holds, read without running any of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from specdraft.errors import UserError
from specdraft.export.quantized import decompress, scheme_of
from specdraft.files import member, read_json
from specdraft.tensors import read_tensors


class Published(NamedTuple):
    """``config.json``, and all tensors of the weights by their names; both as if nothing had been quantized.
    quantization: the scheme of weights that are, if any."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    quantization: str | None = None


def read_published(directory: Path) -> Published:
    """Raises UserError for files that are missing, damaged, pickles, or quantized in a scheme that is not ours."""
    config = read_configuration(directory)
    quantization, tensors = scheme_of(config), _tensors(directory)
    if quantization is not None:
        tensors = decompress(tensors, quantization, config.get("torch_dtype"))
        del config["quantization_config"]
    return Published(config, tensors, quantization)


def read_configuration(directory: Path) -> dict[str, Any]:
    """``config.json``. Raises UserError if it is missing or damaged."""
    config = read_json(member(directory, "config.json"))
    if not isinstance(config, dict):
        raise UserError(f"{directory / 'config.json'} is no configuration: expected that of a drafter; restore it")
    return config


def _tensors(directory: Path) -> dict[str, Tensor]:
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    pickles = sorted(file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in directory.glob(f"*.{suffix}"))
    if not files and pickles:
        raise UserError(
            f"{directory / pickles[0]} is a pickle, which can run code when it is read: expected *.safetensors; if you "
            "trust it, convert it in its directory with `safetensors.torch.save_file(torch.load("
            f"{pickles[0]!r}, weights_only=True), 'model.safetensors')`"
        )
    if not files:
        raise UserError(f"{directory} holds no weights: expected *.safetensors; check the path")
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors |= read_tensors(member(directory, name))
    return tensors
