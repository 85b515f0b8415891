"""Causal attention of packed documents, each by itself, as an attention implementation of transformers.

T = tokens of all documents in one sequence, h = heads, d = head size.

transformers' own way is a mask ``[B, 1, T, T]``: it grows with the square of a row however short the documents are, and
keeps kernels from leaving out what causality hides."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

_NAME = "specdraft_packed"


def can_pack(config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether nothing in the configuration asks for more than plain causal attention, and there is a kernel for it."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    more = ("sliding_window", "attn_logit_softcapping", "attention_dropout")
    asked = any(getattr(config, name, None) for name in more)
    plain = kinds == {"full_attention"} and not asked and config._attn_implementation == "sdpa"
    half = dtype in (torch.bfloat16, torch.float16)
    modern = device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0)
    return plain and (device.type == "cpu" or (modern and torch.__version__ >= "2.13"))


@contextmanager
def packing(config: Any, position_ids: Tensor) -> Iterator[dict[str, Any]]:
    """Within, the model of ``config`` attends so, if it is given these keyword arguments. position_ids: ``[1, T]``;
    they restart at 0 with every document."""
    later = (position_ids[0, 1:] == 0).nonzero()[:, 0] + 1
    bounds = [0, *later.tolist(), position_ids.shape[1]]
    before, config._attn_implementation = config._attn_implementation, _NAME
    try:
        yield {"document_bounds": bounds}
    finally:
        config._attn_implementation = before


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    document_bounds: list[int],
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """``[1, h, T, d]`` -> ``[1, T, h, d]``, as transformers calls and reads it."""
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn  # not in every torch that runs us

        bounds = torch.tensor(document_bounds, dtype=torch.int32).to(query.device, non_blocking=True)
        longest = max(end - start for start, end in pairwise(document_bounds))
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))  # [T, h, d]
        causal = functools.partial(varlen_attn, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        output: Any = causal(q, k, v, bounds, bounds, longest, longest)  # [T, h, d], without auxiliary outputs
        return output[None], None
    lengths = [end - start for start, end in pairwise(document_bounds)]
    alone = functools.partial(scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=True)
    outputs = map(alone, *(each.split(lengths, dim=2) for each in (query, key, value)))
    return torch.cat(list(outputs), dim=2).transpose(1, 2), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
