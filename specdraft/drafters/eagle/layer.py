"""The one decoder layer of an EAGLE head; how its queries find their keys is passed in.

N = rows of a pass, n = rows of it that ask, H = hidden size, d = head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half


class Attend(NamedTuple):
    """How the rows of a pass attend. cos, sin: ``[N, d]``. asking: the rows whose output is wanted, the others only
    leave their keys. attention: from queries ``[n, Hq, d]``, keys and values ``[N, Hk, d]`` to ``[n, Hq, d]``."""

    cos: Tensor
    sin: Tensor
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    asking: Tensor | slice


class Projections(nn.Module):
    """The projections of an attention whose queries, keys and values read ``width`` features."""

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim: int = config.head_dim
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, kv_heads, bias=False)
        self.v_proj = nn.Linear(width, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x: ``[N, width]``; the asking rows attend -> ``[n, H]``."""
        cos, sin, attention, asking = attend

        def rotated(projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            heads = projected.view(len(projected), -1, self.head_dim)  # [N, heads, d]
            return heads * cos[:, None] + rotate_half(heads) * sin[:, None]

        query = rotated(self.q_proj(x[asking]), cos[asking], sin[asking])
        key = rotated(self.k_proj(x), cos, sin)
        value = self.v_proj(x).view(len(x), -1, self.head_dim)
        return self.o_proj(attention(query, key, value).flatten(1))


class PlainLayer(nn.Module):
    """EAGLE-1's layer: a Llama decoder layer without the norm before its attention."""

    def __init__(self, config: LlamaConfig, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = Projections(config, width or config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, residual: Tensor, attend: Attend) -> Tensor:
        """Attention reads x ``[N, width]``, the stream is residual ``[N, H]`` -> the stream behind, ``[n, H]``."""
        hidden = residual[attend.asking] + self.self_attn(x, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FusionLayer(PlainLayer):
    """EAGLE-3's layer: attention reads the normed embedding beside the normed feature; the stream is the feature."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, feature: Tensor, attend: Attend) -> Tensor:
        """embedded, feature: ``[N, H]`` -> the stream behind the layer of the asking rows, ``[n, H]``."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)  # [N, 2H]
        return super().forward(x, feature, attend)
