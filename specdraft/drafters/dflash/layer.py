"""DFlash's decoder layer: the slots of blocks read the target's context and one another.

N = slots of all blocks, M = positions of the context, H = hidden size (the target's), Hq / Hk = query / key-value
heads, d = head size.

Keys and values of the context are projections of the target's fused hidden states, by the very matrices that project
the slots' own; the context itself has no queries, and is the same in every layer."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from transformers import LlamaConfig

from specdraft.drafters.layers import GatedMLP, Projections, RMSNorm


class Angles(NamedTuple):
    """Cos and sin ``[N, d]`` of the rotary positions of a pass."""

    cos: Tensor
    sin: Tensor


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries ``[N, Hq, d]``, keys and values ``[N, Hk, d]`` of the slots to ``[N, Hq, d]``; it knows the context's."""


class BlockAttention(Projections):
    """Qwen3's attention, with norms of queries and keys."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, config.hidden_size, qk_norm=True)

    def forward(self, x: Tensor, angles: Angles, attention: Attention) -> Tensor:
        """x: normed slots ``[N, H]`` -> ``[N, H]``."""
        return self.o_proj(attention(self.query(x, *angles), *self.key_value(x, *angles)).flatten(1))


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer whose attention is told what else there is to see."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, stream: Tensor, angles: Angles, attention: Attention) -> Tensor:
        """The slots' residual stream ``[N, H]`` -> after the layer."""
        stream = stream + self.self_attn(self.input_layernorm(stream), angles, attention)
        return stream + self.mlp(self.post_attention_layernorm(stream))
