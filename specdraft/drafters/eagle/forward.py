"""The forward of an EAGLE head: the layer, its attention in training, and the unrolled training-time test.

R = positions of the flat batch, N = positions of a pass, n = queries: those of them whose output is wanted, H = hidden
size (the target's), Hq / Hk = query / key-value heads, G = Hq // Hk, d = head size.

A position reads the embedding of a token and the feature of the position before it, and gives the hidden state that the
vocabulary projection reads and the feature that the next step reads.

Training-time test (EAGLE-3, 2503.01840, section 3.2; for EAGLE-1 HASS, 2408.15766): after the first step the head reads
its own feature in the place of the target's, so that it learns from its own errors. A query attends causally to the
keys of step 0 and to *its own position's* key of every later step (figure 6). So n queries need n x R scores and s
single ones each, never an [S*T, S*T] mask; and the scores exist for one block of queries at a time, made again in
backward."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from specdraft.drafters.alignment import Alignment
from specdraft.losses.chunked import Step

QUERY_BLOCK = 256


class Output(NamedTuple):
    """Of n positions: ``hidden [n, H]``, which the vocabulary projection reads, and ``feature [n, H]``, which the next
    step reads."""

    hidden: Tensor
    feature: Tensor


class Attend(NamedTuple):
    """How the positions of a pass attend. cos, sin: ``[N, d]``. queries: the positions whose output is wanted, the
    others only leave their keys. attention: from queries ``[n, Hq, d]``, keys and values ``[N, Hk, d]`` to
    ``[n, Hq, d]``."""

    cos: Tensor
    sin: Tensor
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    queries: Tensor | slice


def unroll(
    read: Callable[[Tensor, Tensor, Attend], Output],
    alignment: Alignment,
    feature: Tensor,
    angles: tuple[Tensor, Tensor],
    decay: float,
) -> list[Step]:
    """The steps of the training-time test. read: tokens ``[N]`` and features ``[N, H]`` to the queries' output.
    feature: the target's, ``[R, H]``. angles: cos and sin ``[L, d]`` of every rotary position. Step s weighs decay^s.
    """
    # Where nothing is to be learned one position is read and not counted: under ZeRO-3 all ranks call the same modules.
    asked = [alignment.supervised[0] if len(alignment.supervised[0]) else alignment.starts[:1]]  # [n] per step
    for supervised in alignment.supervised[1:]:
        asked.append(supervised if len(supervised) else asked[-1][:1])
    cos, sin = angles
    attention = UnrolledKeys(alignment.starts, asked[0])
    positions = torch.arange(len(feature), device=feature.device)  # [R]: step 0 leaves the keys of every position
    queries: Tensor | slice = asked[0]  # [n]
    steps: list[Step] = []
    for step, wanted in enumerate(asked):
        if step > 0:
            kept = torch.searchsorted(asked[step - 1], wanted)  # [n], of those of the step before
            attention.narrow(kept)
            feature = feature[kept]  # [n, H], the head's own
            positions, queries = wanted, slice(None)  # [n]
        tokens = alignment.tokens[positions + 1 + step]  # [N]
        rotary = alignment.positions[positions] + step  # [N]
        attend = Attend(cos[rotary], sin[rotary], attention, queries)  # [N, d]
        hidden, feature = read(tokens, feature, attend)  # [n, H]
        count = len(alignment.supervised[step])
        steps.append(Step(hidden[:count], wanted[:count] + 1 + step, decay**step))
    return steps


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
        """x: ``[N, width]``; the queries attend -> ``[n, H]``."""
        cos, sin, attention, queries = attend
        query = self._rotated(self.q_proj(x[queries]), cos[queries], sin[queries])  # [n, Hq, d]
        key = self._rotated(self.k_proj(x), cos, sin)  # [N, Hk, d]
        value = self.v_proj(x).view(len(x), -1, self.head_dim)  # [N, Hk, d]
        attended = attention(query, key, value)  # [n, Hq, d]
        return self.o_proj(attended.flatten(1))  # [n, H]

    def _rotated(self, projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = projected.view(len(projected), -1, self.head_dim)  # [N, heads, d]
        return heads * cos[:, None] + rotate_half(heads) * sin[:, None]


class PlainLayer(nn.Module):
    """EAGLE-1's layer: a Llama decoder layer without the norm before its attention."""

    def __init__(self, config: LlamaConfig, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = Projections(config, width or config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, residual: Tensor, attend: Attend) -> Tensor:
        """Attention reads x ``[N, width]``, the stream is residual ``[N, H]`` -> the stream after it, ``[n, H]``."""
        hidden = residual[attend.queries] + self.self_attn(x, attend)  # [n, H]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # [n, H]


class FusionLayer(PlainLayer):
    """EAGLE-3's layer: attention reads the normed embedding beside the normed feature; the stream is the feature."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, feature: Tensor, attend: Attend) -> Tensor:
        """embedded, feature: ``[N, H]`` -> the stream after the layer, of the queries, ``[n, H]``."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)  # [N, 2H]
        return super().forward(x, feature, attend)


class UnrolledKeys:
    """Keys and values of a training-time test, filled step by step by calling it as the attention."""

    def __init__(self, starts: Tensor, queries: Tensor, block: int = QUERY_BLOCK) -> None:
        """starts: ``[R]`` first position of each one's document. queries: ``[n]`` ascending positions, of step 0."""
        self.starts, self.queries, self.block = starts, queries, block
        self.pairs: list[tuple[Tensor, Tensor]] = []  # keys, values: of step 0 [R, Hk, d], of each later one [n, Hk, d]

    def narrow(self, kept: Tensor) -> None:
        """Go on with some of the queries, ``kept [m]`` (indices into the present ones)."""
        self.queries = self.queries[kept]
        self.pairs[1:] = [(key[kept], value[kept]) for key, value in self.pairs[1:]]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend ``[n, Hq, d] -> [n, Hq, d]``; key and value ``[R, Hk, d]`` at step 0, ``[n, Hk, d]`` later."""
        self.pairs.append((key, value))
        (first_key, first_value), *later = self.pairs
        outputs = []
        for start in range(0, len(self.queries), self.block):
            part = slice(start, start + self.block)
            queries = self.queries[part]  # [b]
            low, high = int(self.starts[queries[0]]), int(queries[-1]) + 1  # they ascend, and so do their documents
            own_keys = torch.stack([k[part] for k, _ in later], dim=2) if later else None  # [b, Hk, s, d]
            own_values = torch.stack([v[part] for _, v in later], dim=2) if later else None
            column = torch.arange(low, high, device=queries.device)
            hidden = (column > queries[:, None]) | (column < self.starts[queries][:, None])  # [b, w]
            given = query[part], first_key[low:high], first_value[low:high], own_keys, own_values, hidden
            outputs.append(checkpoint(attend_block, *given, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(outputs)


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor | None, own_values: Tensor | None, hidden: Tensor
) -> Tensor:
    """Softmax attention of b queries ``[b, Hq, d]`` over w shared keys ``[w, Hk, d]`` and s keys of their own each.
    own_keys, own_values: ``[b, Hk, s, d]`` or None. hidden: bool ``[b, w]``, True where a shared key must not be seen.
    """
    b, num_heads, size = query.shape
    kv_heads = key.shape[1]
    groups = num_heads // kv_heads
    q = query.view(b, kv_heads, groups, size) * size**-0.5
    by_head = q.permute(1, 0, 2, 3).reshape(kv_heads, b * groups, size)  # [Hk, b*G, d]
    scores = by_head @ key.permute(1, 2, 0)  # [Hk, b*G, w]
    scores = scores.view(kv_heads, b, groups, -1).masked_fill(hidden[None, :, None], -torch.inf)
    width = scores.shape[-1]
    if own_keys is not None:
        own = (q @ own_keys.transpose(-1, -2)).permute(1, 0, 2, 3)  # [Hk, b, G, s]
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.float().softmax(-1).to(value.dtype) if scores.dtype != torch.float64 else scores.softmax(-1)
    shared = weights[..., :width].reshape(kv_heads, b * groups, width) @ value.transpose(0, 1)
    output = shared.view(kv_heads, b, groups, size).transpose(0, 1)  # [b, Hk, G, d]
    if own_values is not None:
        output = output + weights[..., width:].transpose(0, 1) @ own_values
    return output.reshape(b, num_heads, size)
