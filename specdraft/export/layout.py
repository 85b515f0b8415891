"""What an exported drafter consists of, and the checks that every family of drafters shares.

A family is a kind of drafter that engines tell apart: eagle3, eagle, p_eagle, mtp, medusa, redrafter, dflash, dspark,
draft_model, pard, tli_draft. Modules here make the ``Layout`` of each. Engines hardly check what they load: a wrong
file stays lossless and accepts nothing. So everything that could go wrong silently is validated before it is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdraft.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TITLES = {
    "eagle3": "EAGLE-3 head",
    "eagle": "EAGLE head",
    "p_eagle": "P-EAGLE head",
    "mtp": "MTP layer",
    "medusa": "Medusa heads",
    "redrafter": "ReDrafter",
    "dflash": "DFlash drafter",
    "dspark": "DSpark drafter",
    "draft_model": "draft model",
    "pard": "PARD draft model",
    "tli_draft": "draft model with another tokenizer",
}


@dataclass(frozen=True)
class Layout:
    """A directory to be: ``config.json`` and one safetensors file named ``weights``; ``facts`` go into the card.
    options: what of the drafter not every engine computes, by the names of its constructor. longest_draft: tokens that
    it was made to draft; None where there is no end to it. borrowed: tensors of the target's that the engine wants in
    the file too, and how their names end in the target's files. quantization: the scheme of its weights, if any.
    files: others that the engine reads beside the two, by name."""

    family: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dtype: str
    weights: str = "model.safetensors"
    facts: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    longest_draft: int | None = None
    borrowed: Mapping[str, str] = field(default_factory=dict)
    quantization: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The family's name in a sentence."""
        return TITLES[self.family]


def cast(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The tensors, contiguous; floating-point ones as ``dtype``."""
    wanted = DTYPES[dtype]
    return {
        name: (tensor.to(wanted) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }


def check_tensors(
    kind: str,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    integers: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Raises UserError unless ``tensors`` are those of ``shapes``, finite and of ``dtype`` or that in ``integers``."""
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        raise UserError(
            f"the tensors are not those of {kind} (missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}): expected a checkpoint that specdraft wrote, unedited"
        )
    dtypes = dict.fromkeys(shapes, DTYPES[dtype]) | dict(integers or {})
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtypes[name]:
            wrong = f"tensor {name} is {tensor.dtype} {list(tensor.shape)}: expected {dtypes[name]} {list(shape)}"
            raise UserError(f"{wrong}; the checkpoint's config.json and model.safetensors do not belong together")
    check_finite(tensors, dtype)


def check_finite(tensors: Mapping[str, Tensor], dtype: str) -> None:
    """Raises UserError for a weight that is not finite, or no longer is in ``dtype``."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            wrong = f"tensor {name} holds values that are not finite in {dtype}: expected finite weights"
            raise UserError(f"{wrong}; export an earlier checkpoint, or with engine.dtype=float32")


def check_positive(config: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raises UserError for a size that is no positive number."""
    for key in keys:
        if config[key] < 1:
            raise UserError(f"the drafter's {key} is {config[key]}: expected a positive number; restore the checkpoint")


def special_ids(target: Mapping[str, Any]) -> dict[str, Any]:
    """The target's bos, eos and pad ids, as far as the checkpoint records them."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: target[key] for key in keys if target.get(key) is not None}


def rope_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and, if there is any, ``rope_scaling``: what engines read where transformers keeps one dict."""
    rest = dict(rope)
    theta = {"rope_theta": rest.pop("rope_theta")}
    return theta if rest.get("rope_type", "default") == "default" else theta | {"rope_scaling": rest}
