"""Attention to the keys of a cache, whose heads several query heads share.

B = requests, n = tokens that each reads, S = keys, h = query heads, k = heads of keys and values, d = head size."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def shared_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """``query [B, h, n, d]``, keys and values ``[B, k, S, d]``, mask: bool ``[B, 1, n, S]``, or as ``for_layers`` makes
    it, or None, if each sees all -> ``[B, n, h, d]``. scale: what scores are multiplied by; None: 1 / sqrt(d).

    The query heads that share keys are handed to the kernel as if they were more tokens, so that it reads the keys
    once: told of the sharing, it reads them for every head, and with a mask may copy them (benchmarks/attention.py)."""
    batch, heads, tokens, _ = query.shape
    shared = heads // keys.shape[1]
    if mask is not None and tokens > 1 and mask.shape[2] != shared * tokens:
        mask = mask[:, :, :tokens].repeat(1, 1, shared, 1)
    queries = query.reshape(batch, keys.shape[1], shared * tokens, -1)
    attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(batch, heads, tokens, -1).transpose(1, 2)


def for_layers(mask: Tensor, shared: int, dtype: torch.dtype) -> Tensor:
    """A bool mask ``[B, 1, n, S]`` as what the kernel adds to the scores, ``[B, 1, shared * n, S]``: made once for all
    layers of a pass, in each of which ``shared`` query heads share keys. Where the heads of a layer are others, it is
    made for that layer again."""
    added = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return added if mask.shape[2] == 1 else added.repeat(1, 1, shared, 1)
