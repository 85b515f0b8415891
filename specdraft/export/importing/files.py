"""What a published directory holds, read without running any of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from specdraft.errors import UserError
from specdraft.files import member, read_json
from specdraft.tensors import read_tensors


class Published(NamedTuple):
    """``config.json``, and all tensors of the weights by their names."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]


def read_published(directory: Path) -> Published:
    """Raises UserError for files that are missing, damaged, quantized or pickles."""
    config = read_json(member(directory, "config.json"))
    if not isinstance(config, dict):
        raise UserError(f"{directory / 'config.json'} is no configuration: expected that of a drafter; restore it")
    if config.get("quantization_config"):
        wrong = f"{directory} holds quantized weights, which are not read back"
        raise UserError(f"{wrong}: expected a head as it was trained; give that, and export it with quantize=")
    return Published(config, _tensors(directory))


def _tensors(directory: Path) -> dict[str, Tensor]:
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    pickles = sorted(file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in directory.glob(f"*.{suffix}"))
    if not files and pickles:
        raise UserError(
            f"{directory / pickles[0]} is a pickle, which can run code when it is read: expected *.safetensors; if you "
            "trust it, convert it with `safetensors.torch.save_file(torch.load(path, weights_only=True), path)`"
        )
    if not files:
        raise UserError(f"{directory} holds no weights: expected *.safetensors; check the path")
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors |= read_tensors(member(directory, name))
    return tensors
