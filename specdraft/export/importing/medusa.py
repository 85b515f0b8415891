"""Public Medusa heads: Medusa's own file, and that of vLLM's earlier converter.

H = hidden size, V = vocabulary. Head h is ``{h}.{l}.linear.{weight,bias}`` and ``{h}.{L}.weight``, or
``blocks.{h}.layers.{l}.{weight,bias}`` and ``lm_heads.{h}.weight``; either with ``medusa_heads.`` before it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from specdraft.export.importing.shared import check_sizes, refuse_layers
from specdraft.export.layout import check_tensors
from specdraft.targets import Target
from specdraft.targets.sizes import at_most

_SPARE = 64  # weights that a constructor makes and drops
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"(\d+)\.\d+\.weight")
_OURS = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")


def read_medusa(
    config: Mapping[str, Any], files: Mapping[str, Tensor], target: Target, layers: Sequence[int] | None
) -> Medusa:
    """The heads of these files, weights in fp32, bound to ``target``. How many there are, and of how many blocks, the
    tensors say. A block without a bias gets one of zeros. Raises UserError for files of another target, for heads that
    share a projection or draft a part of the vocabulary, and for ``layers``, as they read none."""
    refuse_layers(layers, "Medusa heads read")
    check_sizes(target, config, ("hidden_size", "vocab_size"), "Medusa heads", optional=True)
    if config.get("original_lm_head") or "token_map" in files:
        wrong = "the Medusa heads share one projection, or draft a part of the vocabulary"
        raise UserError(f"{wrong}, which specdraft's do not: expected a whole projection for each; train your own")
    tensors = {_our_name(name): tensor.float() for name, tensor in files.items()}
    places = [(int(found[1]), int(found[2])) for found in map(_OURS.match, tensors) if found]
    if not places:
        raise UserError("the files hold no block of a Medusa head: expected complete heads; download them again")
    heads, blocks = (1 + max(numbers) for numbers in zip(*places, strict=True))
    width = target.hidden_size
    for place in sorted(set(places)):
        tensors.setdefault("blocks.{}.layers.{}.bias".format(*place), torch.zeros(width))
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
    }
    with torch.device("meta"), at_most(_SPARE + 4 * len(tensors), "the tensors' names"):
        shell = Medusa(**sizes, num_heads=heads, num_layers=blocks).state_dict()
    check_tensors("Medusa heads", tensors, {name: tuple(each.shape) for name, each in shell.items()}, "float32")
    drafter = Medusa(**sizes, num_heads=heads, num_layers=blocks)
    drafter.load_state_dict(tensors)
    drafter.bind(target)
    return drafter.eval()


def _our_name(name: str) -> str:
    name = name.removeprefix("medusa_heads.")
    if found := _BLOCK.fullmatch(name):
        return "blocks.{}.layers.{}.{}".format(*found.groups())
    found = _PROJECTION.fullmatch(name)
    return f"lm_heads.{found[1]}.weight" if found else name
