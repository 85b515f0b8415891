"""Attention of our own as attention implementations of transformers: causal attention of packed documents, and that
of a step to the keys of a cache.

T = tokens of all documents in one sequence, h = heads, d = head size.

transformers' own way is a mask ``[B, 1, T, T]``: it grows with the square of a row however short the documents are, and
keeps kernels from leaving out what causality hides."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from specdraft.attention import shared_attention

_NAME = "specdraft"
STEPS = "specdraft_steps"  # what the configuration says within ``stepping``


def is_plain(config: Any) -> bool:
    """Whether nothing in the configuration asks for more than plain causal attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    more = ("sliding_window", "attn_logit_softcapping", "attention_dropout")
    asked = any(getattr(config, name, None) for name in more)
    return kinds == {"full_attention"} and not asked and config._attn_implementation == "sdpa"


def can_pack(config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether plain attention is what the configuration asks for, and there is a kernel for all documents at once, or
    none that is faster."""
    return is_plain(config) and (device.type == "cpu" or _has_kernel(device, dtype))


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    half = dtype in (torch.bfloat16, torch.float16)
    modern = device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0)
    return modern and torch.__version__ >= "2.13"


Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""Queries, keys and values ``[1, h, T, d]`` (fewer heads of keys and values, perhaps) and what scores are multiplied by
(None: one over the root of d) to ``[1, T, h, d]``."""


@contextmanager
def attending(config: Any, attend: Attend) -> Iterator[dict[str, Any]]:
    """Within, the model of ``config`` attends so, if it is given these keyword arguments."""
    with _implementation(config, _NAME):
        yield {"attend": attend}


def stepping(config: Any) -> AbstractContextManager[None]:
    """Within, the model of ``config`` attends by ``shared_attention``, where torch's attention is what it asks for."""
    return _implementation(config, STEPS) if config._attn_implementation == "sdpa" else nullcontext()


@contextmanager
def _implementation(config: Any, name: str) -> Iterator[None]:
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def packing(config: Any, position_ids: Tensor) -> AbstractContextManager[dict[str, Any]]:
    """``attending`` to one's own document. position_ids: ``[1, T]``; they restart at 0 with every document."""
    later = (position_ids[0, 1:] == 0).nonzero()[:, 0] + 1
    return attending(config, partial(by_document, [0, *later.tolist(), position_ids.shape[1]]))


def by_document(bounds: list[int], query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """An ``Attend``, of documents that begin and end at ``bounds``, each causally to itself."""
    if _has_kernel(query.device, query.dtype):
        from torch.nn.attention.varlen import varlen_attn  # not in every torch that runs us

        there = torch.tensor(bounds, dtype=torch.int32).to(query.device, non_blocking=True)
        longest = max(end - start for start, end in pairwise(bounds))
        q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))  # [T, h, d]
        causal = partial(varlen_attn, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        output: Any = causal(q, k, v, there, there, longest, longest)  # [T, h, d], without auxiliary outputs
        return output[None]
    lengths = [end - start for start, end in pairwise(bounds)]
    alone = partial(scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=True)
    outputs = map(alone, *(each.split(lengths, dim=2) for each in (query, key, value)))
    return torch.cat(list(outputs), dim=2).transpose(1, 2)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attend: Attend,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls and reads it."""
    return attend(query, key, value, scaling), None


def _step(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls and reads it; attention_mask: as ``shared_attention`` takes it."""
    return shared_attention(query, key, value, attention_mask, scaling), None


AttentionInterface.register(_NAME, _attend)
AttentionInterface.register(STEPS, _step)
AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
AttentionMaskInterface.register(STEPS, sdpa_mask)  # where no mask is given: windows ask for one
