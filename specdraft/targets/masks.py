"""Attention masks of a verification pass, in the form that each transformers architecture takes.

B = requests, n = tokens read, S = cached keys of the longest request + n."""

from typing import Any

import torch
from torch import Tensor

from specdraft.attention import for_layers
from specdraft.errors import UserError
from specdraft.targets.packed_attention import STEPS

_MASKED = ("sdpa", "eager", STEPS)
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def takes_masks(config: Any) -> bool:
    """Whether the attention implementation takes masks; flash attention, for one, does not."""
    return config._attn_implementation in _MASKED


def attention_masks(
    config: Any, visible: Tensor, positions: Tensor, places: Tensor | None, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """What ``attention_mask`` must be so that query i of request b sees the keys that ``visible [B, n, S]`` marks.
    positions: ``[B, n]``. places: ``[B, n]``, where their keys are among the S; None: they are all of them. Keys before
    are those of a text, one after the other. Where layers differ in what they see, the answer is one mask for each
    kind, by the name the model uses. Raises UserError for an attention implementation that takes no masks."""
    implementation = config._attn_implementation
    if not takes_masks(config):
        given = f"the target's attention is {implementation!r}, which takes no masks, as draft trees and batches need"
        raise UserError(f"{given}: expected target.attn_implementation=sdpa or eager")
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if not kinds:
        # Without layer types, a window holds for every layer.
        kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
    masks = {kind: _form(_within(config, kind, visible, positions, places), config, dtype) for kind in kinds}
    return masks if len(masks) > 1 else masks[kinds[0]]


def _within(config: Any, kind: str, visible: Tensor, positions: Tensor, places: Tensor | None) -> Tensor:
    size = getattr(config, _WINDOWED.get(kind, ""), None)
    if size is None:
        return visible
    keys = positions  # [B, S] positions of keys
    if places is not None:
        keys = torch.arange(visible.shape[-1], device=visible.device).repeat(len(visible), 1)
        keys = keys.scatter_(1, places, positions)
    if kind == "chunked_attention":
        return visible & (keys[:, None] // size == positions[..., None] // size)
    return visible & (positions[..., None] - keys[:, None] < size)


def _form(visible: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
    mask = visible[:, None]  # [B, 1, n, S]
    if config._attn_implementation == STEPS:
        heads = config.num_attention_heads
        return for_layers(mask, heads // (getattr(config, "num_key_value_heads", None) or heads), dtype)
    if config._attn_implementation == "sdpa":
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
