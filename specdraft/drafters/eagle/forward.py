"""The forward of an EAGLE head: its layers, their attention in training, and the unrolled training-time test.

R = positions of the flat batch, N = positions of a pass, n = queries: those of them whose output is wanted, H = hidden
size (the target's), Hq / Hk = query / key-value heads, G = Hq // Hk, d = head size.

A position reads the embedding of a token and the feature of the position before it, and gives the hidden state that the
vocabulary projection reads and the feature that the next step reads.

Training-time test (EAGLE-3, 2503.01840, section 3.2; for EAGLE-1 HASS, 2408.15766): after the first step the head reads
its own feature in the place of the target's, so that it learns from its own errors. What its queries attend to is in
``unrolled_keys.py``."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdraft.drafters.alignment import Alignment, StepDecay
from specdraft.drafters.layers import GatedMLP, Projections, RMSNorm
from specdraft.drafters.unrolled_keys import UnrolledKeys
from specdraft.losses.chunked import Step


class Output(NamedTuple):
    """Of n positions: ``hidden [n, H]``, which the vocabulary projection reads, and ``feature [n, H]``, which the next
    step reads."""

    hidden: Tensor
    feature: Tensor


class Attend(NamedTuple):
    """How the positions of a pass attend in a layer. cos, sin: ``[N, d]``. queries: the positions whose output is
    wanted, the others only leave their keys; in a layer below another all are wanted. attention: from queries
    ``[n, Hq, d]``, keys and values ``[N, Hk, d]`` to ``[n, Hq, d]``."""

    cos: Tensor
    sin: Tensor
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    queries: Tensor | slice


Attends = tuple[Attend, ...]  # of every layer, the last one's queries being those whose output is wanted


def unroll(
    read: Callable[[Tensor, Tensor, Attends], Output],
    alignment: Alignment,
    feature: Tensor,
    angles: tuple[Tensor, Tensor],
    decay: StepDecay,
    num_layers: int,
    sliding_window: int | None,
    mask: tuple[int, Tensor] | None = None,
) -> list[Step]:
    """The steps of the training-time test. read: tokens ``[N]`` and features ``[N, H]`` to the queries' output.
    feature: the target's, ``[R, H]``. angles: cos and sin ``[L, d]`` of every rotary position. mask: a token and a
    feature ``[H]`` that later steps read, whatever was drafted (P-EAGLE), instead of the text and their own output."""
    # Where nothing is to be learned one position is read all the same, see ``align``.
    asked = [alignment.supervised[0] if len(alignment.supervised[0]) else alignment.positions.new_zeros(1)]  # [n] each
    for supervised in alignment.supervised[1:]:
        asked.append(supervised if len(supervised) else asked[-1][:1])
    cos, sin = angles
    positions = torch.arange(len(feature), device=feature.device)  # [R]: step 0 leaves the keys of every position
    everything = alignment.documents.whole(len(feature))
    below = [UnrolledKeys(everything, positions, sliding_window) for _ in range(num_layers - 1)]
    last = UnrolledKeys(alignment.documents, asked[0], sliding_window)
    queries: Tensor | slice = asked[0]  # [n]
    steps: list[Step] = []
    for step, wanted in enumerate(asked):
        if step > 0:
            kept = torch.searchsorted(asked[step - 1], wanted)  # [n], of those of the step before
            last.narrow(kept)
            for attention in below:
                attention.narrow(wanted if step == 1 else kept)  # step 0 asked for all
            feature = feature[kept] if mask is None else mask[1].expand(len(wanted), -1)  # [n, H]
            positions, queries = wanted, slice(None)  # [n]
        tokens = alignment.tokens[positions + 1 + step]  # [N]
        if step > 0 and mask is not None:
            tokens = torch.full_like(tokens, mask[0])
        rotary = alignment.positions[positions] + step  # [N]
        here = cos[rotary], sin[rotary]  # [N, d]
        attends = (*(Attend(*here, attention, slice(None)) for attention in below), Attend(*here, last, queries))
        hidden, feature = read(tokens, feature, attends)  # [n, H]
        count, total = len(alignment.supervised[step]), alignment.counts[step]
        shares = None if alignment.shares is None else alignment.shares[step]
        steps.append(Step(hidden[:count], wanted[:count] + 1 + step, decay.weight(step), total=total, shares=shares))
    return steps


class Attention(Projections):
    """The attention of a head's layer, told what its queries see."""

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x: ``[N, width]``; the queries attend -> ``[n, H]``."""
        cos, sin, attention, queries = attend
        query = self.query(x[queries], cos[queries], sin[queries])  # [n, Hq, d]
        attended = attention(query, *self.key_value(x, cos, sin))  # [n, Hq, d]
        return self.o_proj(attended.flatten(1))  # [n, H]


class PlainLayer(nn.Module):
    """EAGLE-1's layer: a Llama decoder layer without the norm before its attention."""

    def __init__(
        self, config: LlamaConfig, width: int | None = None, qk_norm: bool = False, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, width or config.hidden_size, qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config) if mlp is None else mlp

    def forward(self, x: Tensor, residual: Tensor, attend: Attend) -> Tensor:
        """Attention reads x ``[N, width]``, the stream is residual ``[N, H]`` -> the stream after it, ``[n, H]``."""
        hidden = residual[attend.queries] + self.self_attn(x, attend)  # [n, H]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # [n, H]


class FusionLayer(PlainLayer):
    """EAGLE-3's first layer: attention reads the normed embedding beside the normed feature; the stream is the feature,
    or with ``norm_before_residual`` the normed one."""

    def __init__(self, config: LlamaConfig, qk_norm: bool = False, norm_before_residual: bool = False) -> None:
        super().__init__(config, 2 * config.hidden_size, qk_norm)
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, feature: Tensor, attend: Attend) -> Tensor:
        """embedded, feature: ``[N, H]`` -> the stream after the layer, of the queries, ``[n, H]``."""
        normed = self.hidden_norm(feature)  # [N, H]
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [N, 2H]
        return super().forward(x, normed if self.norm_before_residual else feature, attend)


class LaterLayer(PlainLayer):
    """EAGLE-3's further layers: a Llama or Qwen3 decoder layer as it is, or with another ``mlp`` in it."""

    def __init__(self, config: LlamaConfig, qk_norm: bool = False, mlp: nn.Module | None = None) -> None:
        super().__init__(config, qk_norm=qk_norm, mlp=mlp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, stream: Tensor, attend: Attend) -> Tensor:  # type: ignore[override]
        """stream: ``[N, H]`` -> after the layer, of the queries, ``[n, H]``."""
        return super().forward(self.input_layernorm(stream), stream, attend)
