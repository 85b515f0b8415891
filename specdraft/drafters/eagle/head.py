"""What every EAGLE head shares: the training-time test, the state of a request, and drafting.

R = rows of the flat batch, N = rows of a pass, n = rows of it that ask, H = hidden size (the target's), Vd = draft
vocabulary.

- A row reads the embedding of a token and the feature of the position before it, and gives the hidden state that the
  vocabulary projection reads and the feature that the next step reads.
- Training-time test (EAGLE-3, 2503.01840, section 3.2; for EAGLE-1 HASS, 2408.15766): after the first step the head
  reads its own feature in the place of the target's, so that it learns from its own errors.
- One forward, ``_read``, serves training and decoding; only the keys it attends to differ (``attention.py``).
- The embedding is the target's: borrowed, never copied.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import DraftTree
from specdraft.drafters.alignment import Alignment, align, count_rows
from specdraft.drafters.attention import CachedKeys, KeysSideBySide, UnrolledKeys
from specdraft.drafters.base import Drafter, TrainingLoss
from specdraft.drafters.draft_tree_builder import Level, Vocabulary, grow_batch
from specdraft.drafters.eagle.layer import Attend
from specdraft.drafters.eagle.rotary import RotaryTable
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, Teacher
from specdraft.losses.divergence import divergence as divergence_of
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch

_ROPE_BY_LENGTH = ("dynamic", "longrope")  # a position's angle depends on how long the text is


class Output(NamedTuple):
    """Of n rows: ``hidden [n, H]``, which the vocabulary projection reads, and ``feature [n, H]``, which the next step
    reads."""

    hidden: Tensor
    feature: Tensor


@dataclass
class EagleState:
    """A request: the keys of all emitted positions, and the output at the last one (n = 1)."""

    keys: CachedKeys
    output: Output | None = None


class EagleHead(Drafter):
    """A head of the family; a subclass says what the feature is, what the layer reads, and what is learnt."""

    target: Target
    training_options = frozenset({"ttt_steps", "step_decay", "divergence"})

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        vocab_size: int,
        rms_norm_eps: float,
        rope_parameters: Mapping[str, Any],
        max_position_embeddings: int,
        hidden_act: str = "silu",
        ttt_steps: int = 5,
        step_decay: float = 0.8,
        divergence: str | Mapping[str, Any] = "forward_kl",
    ) -> None:
        """Keep what all heads have.

        Raises UserError for an unknown divergence, no training-time-test step, and rotary angles that change with the
        length of the text.
        """
        super().__init__()
        if rope_parameters.get("rope_type") in _ROPE_BY_LENGTH:
            raise UserError(
                f"the head has rope_type={rope_parameters['rope_type']}, whose angles change with the length of the "
                "text: expected default, linear, llama3 or yarn, as for_target chooses"
            )
        if ttt_steps < 1:
            raise UserError(f"ttt_steps is {ttt_steps}: expected at least 1 step of the training-time test")
        self.vocab_size, self.ttt_steps, self.step_decay = vocab_size, ttt_steps, step_decay
        self.divergence = divergence_of(divergence)
        layer = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": head_dim,
            "rms_norm_eps": rms_norm_eps,
            "rope_parameters": dict(rope_parameters),
            "max_position_embeddings": max_position_embeddings,
            "hidden_act": hidden_act,
        }
        self._arguments: dict[str, Any] = layer | {
            "vocab_size": vocab_size,
            "ttt_steps": ttt_steps,
            "step_decay": step_decay,
            "divergence": divergence if isinstance(divergence, str) else dict(divergence),
        }
        self.layer_config = LlamaConfig(**layer)
        self.rotary = RotaryTable(self.layer_config)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return dict(self._arguments)

    # --- what differs -----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The draft vocabulary."""

    @abstractmethod
    def _feature(self, features: Features) -> Tensor:
        """The target's features ``[B, T, ...]`` as the head reads them, ``[B * T, H]``."""

    @abstractmethod
    def _layer(self, embedded: Tensor, feature: Tensor, attend: Attend) -> Output:
        """The rows embedded, feature ``[N, H]`` -> the output of those that ask."""

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, Vd]`` of ``hidden [n, H]``."""

    @abstractmethod
    def _loss(self, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        """What the steps' hidden states are worth."""

    # --- training ---------------------------------------------------------------------------------------------------

    def count_rows(self, batch: Batch) -> Tensor:
        """Of every step."""
        return count_rows(batch, self.ttt_steps)

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """Training-time test: per step the mean loss over its supervised rows, times decay^step."""
        self.bind(target)
        alignment = align(batch, self.ttt_steps)
        labels = alignment.tokens[1 : 1 + batch.input_ids.numel()]  # behind row r comes token r+1
        teacher = Teacher(features.last.flatten(0, 1), target.logits, self.vocabulary.ids, labels)
        steps = self._unroll(alignment, self._feature(features))
        for step, total in zip(steps, totals or (), strict=totals is not None):
            step.total = total
        return self._loss(steps, teacher)

    def _unroll(self, alignment: Alignment, feature: Tensor) -> list[Step]:
        # Where nothing is to be learnt one row is read and not counted: under ZeRO-3 all ranks run the same modules.
        asked = [rows if len(rows) else alignment.starts[:1] for rows in alignment.rows[:1]]
        for rows in alignment.rows[1:]:
            asked.append(rows if len(rows) else asked[-1][:1])
        rows = asked[0]
        attention = UnrolledKeys(alignment.starts, rows)
        cos, sin = self.rotary(int(alignment.positions.max()) + self.ttt_steps, next(self.parameters()))
        reading: Tensor = torch.arange(len(feature), device=rows.device)  # step 0 leaves the keys of every row
        asking: Tensor | slice = rows
        steps: list[Step] = []
        for step, rows in enumerate(asked):
            if step > 0:
                kept = torch.searchsorted(asked[step - 1], rows)
                attention.narrow(kept)
                feature, reading, asking = feature[kept], rows, slice(None)
            position = alignment.positions[reading] + step
            attend = Attend(cos[position], sin[position], attention, asking)
            hidden, feature = self._read(alignment.tokens[reading + 1 + step], feature, attend)
            counted = slice(len(alignment.rows[step]))
            steps.append(Step(hidden[counted], rows[counted] + 1 + step, self.step_decay**step))
        return steps

    def training_flops(self, row_length: int) -> tuple[float, float]:
        """The matrices and the attention, once per step."""
        forward, backward = super().training_flops(row_length)
        config = self.layer_config
        attention = 2.0 * config.num_attention_heads * config.head_dim * row_length
        return self.ttt_steps * (forward + attention), self.ttt_steps * (backward + 2.0 * attention)

    def activation_bytes(self, tokens: int, element: int) -> float:
        """The layer's inputs at every step, and the target's features."""
        config = self.layer_config
        hidden, inner = config.hidden_size, config.intermediate_size
        attention = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        # residuals, norms and their fp32 copies, embedding and feature, q k v and rotated q k, attention out, gated MLP
        per_row = self.ttt_steps * (14 * hidden + 2 * attention + 4 * inner) + len(self.layers) * hidden
        return float(per_row * tokens * element)

    # --- decoding ---------------------------------------------------------------------------------------------------

    def start(self, first_token: int, max_length: int) -> EagleState:
        """An empty state; the first token has no feature before it, so the head never sees it."""
        return EagleState(CachedKeys(max_length))

    def advance(self, state: EagleState, tokens: Tensor, features: Features) -> None:
        """Append the true rows; their keys replace those of what was drafted there."""
        self.advance_batch([state], [tokens], [features])

    def advance_batch(
        self, states: Sequence[EagleState], tokens: Sequence[Tensor], features: Sequence[Features]
    ) -> None:
        """In one pass over the rows of all requests."""
        together = type(features[0])(*(torch.cat(parts, dim=1) for parts in zip(*features, strict=True)))
        outputs = self._append([state.keys for state in states], tokens, self._feature(together))
        for state, output in zip(states, outputs, strict=True):
            state.output = output

    def draft(
        self, state: EagleState, shape: Shape, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """A chain or tree; every node reads the feature that its parent's row gave."""
        return self.draft_batch([state], [shape], sampling, [generator])[0]

    def draft_batch(
        self,
        states: Sequence[EagleState],
        shapes: Sequence[Shape],
        sampling: Sampling,
        generators: Sequence[torch.Generator | None],
    ) -> list[DraftTree]:
        """A pass for each level of all drafts."""
        emitted = [state.keys.length for state in states]
        outputs = [state.output for state in states if state.output is not None]
        assert len(outputs) == len(states), "advance comes before draft"

        def expand(levels: Mapping[int, Level]) -> Sequence[Tensor]:
            counts = [len(level.tokens) for level in levels.values()]
            tokens = torch.cat([level.tokens for level in levels.values()])
            feature = torch.cat([outputs[number].feature[level.parents] for number, level in levels.items()])
            # All of a level stand at one position.
            positions = [[emitted[number] + level.depth - 1] * len(level.tokens) for number, level in levels.items()]
            seen = [level.seen for level in levels.values()]
            keys = KeysSideBySide([states[number].keys for number in levels], counts, counts, seen)
            output = self._read(tokens, feature, self._attend(positions, keys))
            for number, *parts in zip(levels, *(part.split(counts) for part in output), strict=True):
                outputs[number] = Output(*parts)
            return self._logits(output.hidden).split(counts)

        logits = self._logits(torch.cat([output.hidden for output in outputs]))
        drafts = grow_batch(logits, expand, shapes, sampling, generators, self.vocabulary)
        for state, length in zip(states, emitted, strict=True):
            state.keys.length = length
        return drafts

    def _append(self, requests: Sequence[CachedKeys], tokens: Sequence[Tensor], feature: Tensor) -> list[Output]:
        """Read the next tokens ``[n]`` of each request, feature ``[sum of n, H]`` -> the output at the last of each."""
        added = [len(each) for each in tokens]
        positions = [range(keys.length, keys.length + count) for keys, count in zip(requests, added, strict=True)]
        # Only the newest row is asked what follows; the others just leave their keys.
        last = [end - 1 for end in accumulate(added)]
        keys = KeysSideBySide(requests, added, [1] * len(requests), [None] * len(requests))
        output = self._read(torch.cat(list(tokens)), feature, self._attend(positions, keys, last))
        return [Output(*parts) for parts in zip(*(part.split(1) for part in output), strict=True)]

    def _attend(
        self, positions: Sequence[Sequence[int]], keys: KeysSideBySide, asking: Sequence[int] | None = None
    ) -> Attend:
        """How rows attend that stand at these positions, of each request; ``asking``: the rows that do, or all."""
        flat = list(chain.from_iterable(positions))
        cos, sin = self.rotary(max(flat) + 1, next(self.parameters()))
        here = torch.tensor(flat, device=cos.device)
        rows = slice(None) if asking is None else torch.tensor(asking, device=cos.device)
        return Attend(cos[here], sin[here], keys, rows)

    # --- both -------------------------------------------------------------------------------------------------------

    def _read(self, tokens: Tensor, feature: Tensor, attend: Attend) -> Output:
        """The one forward of training and decoding: tokens ``[N]``, feature ``[N, H]`` -> the rows that ask."""
        embedded = nn.functional.embedding(tokens, self.target.embedding_weight).to(feature.dtype)
        return self._layer(embedded, feature, attend)


def shape_of(target: Target, intermediate_size: int | None) -> dict[str, Any]:
    """The arguments of a head shaped like one layer of ``target``; ``intermediate_size`` None is the target's own."""
    config = target.config
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)  # targets with sliding windows keep one set per kind of layer
    if rope.get("rope_type") in _ROPE_BY_LENGTH:  # a head of one layer does with the plain angles
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_parameters": {key: value for key, value in rope.items() if key != "partial_rotary_factor"},
        "max_position_embeddings": target.max_length,
    }


def initialize(module: nn.Module) -> None:
    """Weights of linear layers from N(0, 0.02), as the targets' own were."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
