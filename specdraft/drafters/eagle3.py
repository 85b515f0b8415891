"""EAGLE-3 (2503.01840): one decoder layer over fused target features, trained on its own outputs.

R = rows of the flat batch, n = rows of a step, H = hidden size (the target's), Vd = draft vocabulary, V = target's.

- Three auxiliary hidden states of the target, concatenated, go through ``fc`` to one feature g.
- The layer's attention reads ``[norm(embedding of the next token), norm(g)]``, 2H wide; the residual stream is g.
- Training-time test: the head's own output replaces g for ``ttt_steps`` steps, so that it learns from its own errors.
- One forward, ``_layer_step``, serves training and decoding; only the keys it attends to differ (``attention.py``).
- Embedding and final logits of the target are borrowed, never copied; the draft vocabulary travels in the checkpoint.

Parameter names are those that serving engines load.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import DraftTree
from specdraft.drafters.alignment import align
from specdraft.drafters.attention import CachedKeys, UnrolledKeys
from specdraft.drafters.base import Drafter, TrainingLoss
from specdraft.drafters.batch import Batch
from specdraft.drafters.growth import Level, Vocabulary, grow
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, StepResult, Teacher, distillation_loss
from specdraft.targets import Features, Target

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class WideAttention(nn.Module):
    """Projections of an attention whose queries, keys and values read 2H; the attending itself is passed in."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.head_dim is not None and config.num_key_value_heads is not None
        self.head_dim: int = config.head_dim
        width, heads = 2 * config.hidden_size, config.num_attention_heads * self.head_dim
        kv_heads = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, kv_heads, bias=False)
        self.v_proj = nn.Linear(width, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention, asking: Tensor | slice) -> Tensor:
        """x: ``[N, 2H]``, cos and sin: ``[N, d]``; the rows ``asking`` attend -> ``[n, H]``."""

        def rotated(projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            heads = projected.view(len(projected), -1, self.head_dim)  # [N, heads, d]
            return heads * cos[:, None] + rotate_half(heads) * sin[:, None]

        query = rotated(self.q_proj(x[asking]), cos[asking], sin[asking])
        key = rotated(self.k_proj(x), cos, sin)
        value = self.v_proj(x).view(len(x), -1, self.head_dim)
        return self.o_proj(attention(query, key, value).flatten(1))


class FusionLayer(nn.Module):
    """The decoder layer ("midlayer"): pre-norm attention over embedding and feature, then a gated MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = WideAttention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embedded: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attention: Attention, asking: Tensor | slice
    ) -> Tensor:
        """embedded, feature: ``[N, H]`` -> the residual stream after the layer of the ``asking`` rows ``[n, H]``."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)  # [N, 2H]
        hidden = feature[asking] + self.self_attn(x, cos, sin, attention, asking)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Linear):
    """The projection to the draft vocabulary; with ``loss`` it hands its weight to a loss that fuses the projection.

    Both go through ``forward`` because ZeRO-3 gathers a partitioned weight only while its module is called.
    """

    def forward(self, hidden: Tensor, loss: Callable[[Tensor], Any] | None = None) -> Any:
        """Logits ``[..., Vd]`` of ``hidden [..., H]``, or what ``loss`` makes of the weight ``[Vd, H]``."""
        return super().forward(hidden) if loss is None else loss(self.weight)


@dataclass
class Eagle3State:
    """A request: the keys of all emitted positions, and the layer's output ``[1, H]`` at the last one."""

    keys: CachedKeys
    output: Tensor | None = None


class Eagle3(Drafter):
    """The EAGLE-3 head. ``fc_norm`` (a norm per auxiliary state) and ``norm_output`` (the head feeds back its normed
    output) are EAGLE-3.1's options; an engine must be told of both."""

    d2t: Tensor
    t2d: Tensor
    target: Target

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        vocab_size: int,
        draft_vocab_size: int,
        layers: Sequence[int],
        rms_norm_eps: float,
        rope_parameters: dict[str, Any],
        max_position_embeddings: int,
        hidden_act: str = "silu",
        fc_norm: bool = False,
        norm_output: bool = False,
        ttt_steps: int = 5,
        step_decay: float = 0.8,
    ) -> None:
        """Build with random weights; ``draft_vocab_size`` ids 0..Vd-1 until ``set_draft_vocabulary``.

        Raises UserError for a draft vocabulary larger than the vocabulary, or no training-time-test step.
        """
        super().__init__()
        if not 1 <= draft_vocab_size <= vocab_size:
            raise UserError(
                f"draft_vocab_size is {draft_vocab_size}: expected 1 to {vocab_size}, the target's vocabulary size"
            )
        if ttt_steps < 1:
            raise UserError(f"ttt_steps is {ttt_steps}: expected at least 1 step of the training-time test")
        arguments = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self._arguments = {**arguments, "layers": list(layers), "rope_parameters": dict(rope_parameters)}
        self.layers = tuple(layers)
        self.norm_output, self.ttt_steps, self.step_decay = norm_output, ttt_steps, step_decay
        self.vocab_size = vocab_size
        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=rms_norm_eps,
            rope_parameters=dict(rope_parameters),
            max_position_embeddings=max_position_embeddings,
            hidden_act=hidden_act,
        )
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(hidden_size, rms_norm_eps) for _ in self.layers) if fc_norm else None
        self.fc = nn.Linear(len(self.layers) * hidden_size, hidden_size, bias=False)
        self.midlayer = FusionLayer(config)
        self.norm = LlamaRMSNorm(hidden_size, rms_norm_eps)
        self.lm_head = DraftHead(hidden_size, draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self._table: tuple[Tensor, Tensor] | None = None
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(vocab_size) < draft_vocab_size)
        self.apply(_initialise)

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        **options: Any,
    ) -> "Eagle3":
        """A head shaped like one layer of ``target``; its projection starts from the target's own rows.

        draft_vocabulary: ascending target ids ``[Vd]``; None for the whole vocabulary.
        """
        config = target.config
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)  # targets with sliding windows keep one set per kind of layer
        head = cls(
            hidden_size=target.hidden_size,
            intermediate_size=intermediate_size or config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
            vocab_size=target.vocab_size,
            draft_vocab_size=target.vocab_size if draft_vocabulary is None else len(draft_vocabulary),
            layers=target.check_layers(target.default_layers() if layers is None else layers),
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_parameters={key: value for key, value in rope.items() if key != "partial_rotary_factor"},
            max_position_embeddings=target.max_length,
            **options,
        )
        if draft_vocabulary is not None:
            head.set_draft_vocabulary(draft_vocabulary)
        rows = target.head.weight.detach()[head.draft_ids.to(target.device)]
        head.lm_head.weight.data.copy_(rows)
        head.bind(target)
        return head

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return dict(self._arguments)

    def set_draft_vocabulary(self, ids: Tensor) -> None:
        """Take the ascending target ids ``[Vd]`` as the draft vocabulary; ``d2t`` holds offsets, as engines expect."""
        wanted = len(self.d2t)
        if len(ids) != wanted or bool((ids.diff() <= 0).any()) or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise UserError(
                f"the draft vocabulary has {len(ids)} ids: expected {wanted} ascending ids below {self.vocab_size}"
            )
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ``[Vd]``."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def training_loss(self, batch: Batch, features: Features, target: Target) -> TrainingLoss:
        """Training-time test (section 3.2): per step the mean divergence over its supervised rows, times decay^step.

        Metrics per step i: loss_sum, alpha_sum, match_sum (the draft's best token is the target's, at every step so
        far), each over ``row_total`` rows.
        """
        self.bind(target)
        alignment = align(batch, self.ttt_steps)
        rows = alignment.rows[0]
        if len(rows) == 0:  # nothing to learn here, but other ranks wait for this one's gradients
            return TrainingLoss(sum((p.sum() * 0.0 for p in self.parameters()), rows.new_zeros(())), {})
        attention = UnrolledKeys(alignment.starts, rows)
        cos, sin = self._angles(int(alignment.positions.max()) + self.ttt_steps)
        feature = self._fuse(features.aux.flatten(0, 1))  # [R, H]
        reading: Tensor = torch.arange(len(feature), device=rows.device)  # step 0 leaves the keys of every row
        asking: Tensor | slice = rows
        steps: list[Step] = []
        for step, rows in enumerate(alignment.rows):
            if len(rows) == 0:
                break
            if step > 0:
                kept = torch.searchsorted(alignment.rows[step - 1], rows)
                attention.narrow(kept)
                feature, reading, asking = feature[kept], rows, slice(None)
            position = alignment.positions[reading] + step
            output = self._layer_step(
                alignment.tokens[reading + 1 + step], feature, cos[position], sin[position], attention, asking
            )
            normed = self.norm(output)
            steps.append(Step(normed, rows + 1 + step, self.step_decay**step))
            feature = normed if self.norm_output else output
        full = len(self.d2t) == self.vocab_size
        teacher = Teacher(features.last.flatten(0, 1), target.logits, None if full else self.draft_ids)
        loss, results = self.lm_head(steps[0].hidden, loss=lambda weight: distillation_loss(weight, teacher, steps))
        return TrainingLoss(loss, _metrics(steps, results))

    def start(self, first_token: int, max_length: int) -> Eagle3State:
        """An empty state; the first token has no feature before it, so the head never sees it."""
        return Eagle3State(CachedKeys(max_length))

    def advance(self, state: Eagle3State, tokens: Tensor, features: Features) -> None:
        """Append the true rows; their keys replace those of what was drafted there."""
        feature = self._fuse(features.aux[0])  # [n, H]
        state.output = self._append(state.keys, tokens, feature)

    def draft(
        self, state: Eagle3State, shape: Shape, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """A chain or tree; every node reads its parent's output as the feature."""
        assert state.output is not None, "advance comes before draft"
        emitted, output = state.keys.length, state.output

        def expand(level: Level) -> Tensor:
            nonlocal output
            feature = (self.norm(output) if self.norm_output else output)[level.parents]
            cos, sin = self._angles(emitted + level.depth)
            here = slice(emitted + level.depth - 1, emitted + level.depth)  # all of a level stand at one position
            attention = partial(state.keys, seen=level.seen)
            output = self._layer_step(level.tokens, feature, cos[here], sin[here], attention, slice(None))
            return self.lm_head(self.norm(output))

        vocabulary = Vocabulary(self.vocab_size, self.draft_ids)
        tree = grow(self.lm_head(self.norm(output)), expand, shape, sampling, generator, vocabulary)
        state.keys.length = emitted
        return tree

    def _append(self, keys: CachedKeys, tokens: Tensor, feature: Tensor) -> Tensor:
        # Only the newest row is asked what follows; the others just leave their keys.
        cos, sin = self._angles(keys.length + len(tokens))
        here = slice(keys.length, keys.length + len(tokens))
        return self._layer_step(tokens, feature, cos[here], sin[here], keys, slice(len(tokens) - 1, None))

    def _fuse(self, aux: Tensor) -> Tensor:
        """Auxiliary states ``[R, 3H]`` -> features ``[R, H]``."""
        aux = aux.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def _layer_step(
        self, tokens: Tensor, feature: Tensor, cos: Tensor, sin: Tensor, attention: Attention, asking: Tensor | slice
    ) -> Tensor:
        """The one forward of training and decoding: tokens ``[N]``, feature ``[N, H]`` -> asking rows ``[n, H]``."""
        embedded = nn.functional.embedding(tokens, self.target.embedding_weight).to(feature.dtype)
        return self.midlayer(embedded, feature, cos, sin, attention, asking)

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin ``[>= length, d]`` in the weights' dtype, made once for many positions."""
        weight = self.fc.weight
        table = self._table
        kind = (weight.dtype, weight.device)
        if table is None or len(table[0]) < length or (table[0].dtype, table[0].device) != kind:
            size = max(length, min(2 * length, self._arguments["max_position_embeddings"]))
            # Decoding runs in inference mode, whose tensors a later training step could not use.
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = self.rotary(weight, torch.arange(size, device=weight.device)[None])
            self._table = table = cos[0], sin[0]
        return table


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


def _metrics(steps: Sequence[Step], results: Sequence[StepResult]) -> dict[str, Tensor]:
    metrics: dict[str, Tensor] = {}
    matched = results[0].matched
    for index, (step, result) in enumerate(zip(steps, results, strict=True)):
        if index > 0:  # a row that was left out needs no prefix: rows only ever get fewer
            previous = steps[index - 1].positions - index  # positions are rows + 1 + step
            kept = torch.searchsorted(previous, step.positions - index - 1)
            matched = matched[kept] & result.matched
        metrics[f"step_{index}/loss_sum"] = result.loss_sum
        metrics[f"step_{index}/alpha_sum"] = result.alpha_sum
        metrics[f"step_{index}/match_sum"] = matched.sum()
        metrics[f"step_{index}/row_total"] = torch.tensor(len(matched), device=matched.device)
    return metrics
