"""The EAGLE head: its arguments, its loss over the unrolled steps, and how it drafts.

R = positions of the flat batch, N = positions of a pass, n = positions of a request or a step, m = those of them that
are queries, H = hidden size (the target's), Hq / Hk = query / key-value heads, d = head size, Vd = draft vocabulary.

One ``_read`` serves training (``forward.py``) and drafting, and only the keys that it attends to differ. The embedding
is the target's: borrowed, never copied."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import LlamaConfig

from specdraft.decoding.cache import RewindableCache
from specdraft.decoding.sampling import Generators, Sampling
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import DraftTree
from specdraft.drafters.alignment import Alignment, StepDecay, align, count_supervised
from specdraft.drafters.base import BatchDrafter, TrainingLoss, constructor_arguments
from specdraft.drafters.draft_tree_builder import Level, Vocabulary, grow_batch
from specdraft.drafters.eagle.compiled import run_layer
from specdraft.drafters.eagle.forward import Attend, Output, unroll
from specdraft.drafters.eagle.rotary import RotaryTable
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, Teacher
from specdraft.losses.divergence import divergence as divergence_of
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch

_ROPE_BY_LENGTH = ("dynamic", "longrope")  # a position's angle depends on how long the text is


@dataclass
class EagleState:
    """A request: the keys and values of all emitted positions, and the output at the last one (n = 1)."""

    keys: RewindableCache
    output: Output = field(init=False)


class EagleHead(BatchDrafter):
    """A head of the family; a subclass says what the feature is, what the layer reads, and what is learned."""

    target: Target
    training_options = frozenset({"ttt_steps", "step_decay", "sample_positions", "divergence"})
    residual_widths: ClassVar[int] = 14  # hidden states that a step keeps for backward beside attention and MLP

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
        sample_positions: bool = False,
        divergence: str | Mapping[str, Any] = "forward_kl",
    ) -> None:
        """Raises UserError for an unknown divergence, no training-time-test step, a decay that cannot be sampled, and
        rotary angles that change with the length of the text."""
        arguments = constructor_arguments(locals())
        super().__init__()
        if rope_parameters.get("rope_type") in _ROPE_BY_LENGTH:
            raise UserError(
                f"the head has rope_type={rope_parameters['rope_type']}, whose angles change with the length of the "
                "text: expected default, linear, llama3 or yarn, as for_target chooses"
            )
        if ttt_steps < 1:
            raise UserError(f"ttt_steps is {ttt_steps}: expected at least 1 step of the training-time test")
        self._arguments = arguments
        self.vocab_size, self.ttt_steps = vocab_size, ttt_steps
        self.decay = StepDecay(step_decay, sample_positions)
        self.divergence = divergence_of(divergence)
        of_layer = arguments.keys() - EagleHead.training_options - {"vocab_size"}
        self.layer_config = LlamaConfig(**{name: arguments[name] for name in of_layer})
        self.rotary = RotaryTable(self.layer_config)

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The draft vocabulary."""

    @abstractmethod
    def _feature(self, features: Features) -> Tensor:
        """The target's features ``[B, T, ...]`` as the head reads them, ``[B * T, H]``."""

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, Vd]`` of ``hidden [n, H]``."""

    @abstractmethod
    def _layer(self, embedded: Tensor, feature: Tensor, attend: Attend) -> Output:
        """Of embedded, feature ``[N, H]`` the queries' output."""

    @abstractmethod
    def _loss(self, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        """What the steps' hidden states are worth."""

    def _read(self, tokens: Tensor, feature: Tensor, attend: Attend) -> Output:
        """The one forward of training and decoding: tokens ``[N]``, feature ``[N, H]`` -> the queries' output."""
        embedded = nn.functional.embedding(tokens, self.target.embedding_weight).to(feature.dtype)  # [N, H]
        return run_layer(self, self._layer, embedded, feature, attend)

    def count_supervised(self, batch: Batch) -> Tensor:
        """Of every step."""
        return count_supervised(batch, self.ttt_steps)

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """Training-time test: per step the mean loss over its supervised positions, times decay^step; where positions
        are sampled, an estimate of that. Validation takes all."""
        self.bind(target)
        decay = self.decay if self.training else StepDecay(self.decay.base)
        alignment = align(batch, self.ttt_steps, decay)
        labels = alignment.tokens[1 : 1 + batch.input_ids.numel()]  # [R], after position r comes token r+1
        teacher = Teacher(features.last.flatten(0, 1), target.logits, self.vocabulary.ids, labels)
        steps = self._unroll(alignment, self._feature(features), decay)
        for step, total in zip(steps, totals or (), strict=totals is not None):
            step.total = total
        return self._loss(steps, teacher)

    @property
    def passes(self) -> float:
        """Of a position through the layer in a training step, on average."""
        return sum(self.decay.share(step) for step in range(self.ttt_steps))

    def _unroll(self, alignment: Alignment, feature: Tensor, decay: StepDecay) -> list[Step]:
        angles = self.rotary(alignment.length + self.ttt_steps - 1, next(self.parameters()))
        return unroll(self._read, alignment, feature, angles, decay)

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """The matrices and the attention, once per pass."""
        forward, backward = super().training_flops(sequence_length)
        config = self.layer_config
        attention = 2.0 * config.num_attention_heads * config.head_dim * sequence_length
        return self.passes * (forward + attention), self.passes * (backward + 2.0 * attention)

    def activation_bytes(self, tokens: int, element: int) -> float:
        """The layer's inputs at every pass, and the target's features."""
        config, hidden = self.layer_config, self.layer_config.hidden_size
        attention = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        # residuals, norms and their fp32 copies, embedding and feature; q k v and rotated q k, attention out; gated MLP
        per_pass = self.residual_widths * hidden + 2 * attention + 4 * config.intermediate_size
        return float((self.passes * per_pass + len(self.layers) * hidden) * tokens * element)

    def start(self, first_token: int, max_length: int) -> EagleState:
        """An empty state; the first token has no feature before it, so the head never sees it."""
        return EagleState(RewindableCache(1, max_length))

    def advance(self, state: EagleState, tokens: Tensor, features: Features) -> None:
        """Append what was emitted; its keys replace those of what was drafted there."""
        self.advance_batch([state], [tokens], [features])

    def advance_batch(
        self, states: Sequence[EagleState], tokens: Sequence[Tensor], features: Sequence[Features]
    ) -> None:
        """In one pass over the positions of all requests."""
        together = type(features[0])(*(torch.cat(parts, dim=1) for parts in zip(*features, strict=True)))
        outputs = self._append([state.keys for state in states], tokens, self._feature(together))
        for state, output in zip(states, outputs, strict=True):
            state.output = output

    def draft_batch(
        self, states: Sequence[EagleState], shapes: Sequence[Shape], sampling: Sampling, generators: Generators
    ) -> list[DraftTree]:
        """A pass for each level of all drafts; every node reads the feature that its parent gave."""
        emitted = [state.keys.length for state in states]
        outputs = {number: state.output for number, state in enumerate(states)}

        def expand(levels: Mapping[int, Level]) -> Sequence[Tensor]:
            requests = [states[number].keys for number in levels]
            feature = torch.cat([outputs[number].feature[level.parents] for number, level in levels.items()])
            # All of a level stand at one position.
            positions = [[emitted[number] + level.depth - 1] * len(level.tokens) for number, level in levels.items()]
            tokens, seen = [level.tokens for level in levels.values()], [level.seen for level in levels.values()]
            read = self._append(requests, tokens, feature, positions, seen)
            outputs.update(zip(levels, read, strict=True))
            return self._logits(torch.cat([output.hidden for output in read])).split([len(each) for each in tokens])

        logits = self._logits(torch.cat([output.hidden for output in outputs.values()]))
        drafts = grow_batch(logits, expand, shapes, sampling, generators, self.vocabulary)
        for state, length in zip(states, emitted, strict=True):
            state.keys.crop(length)
        return drafts

    def _append(
        self,
        requests: Sequence[RewindableCache],
        tokens: Sequence[Tensor],
        feature: Tensor,
        positions: Sequence[Sequence[int]] | None = None,
        seen: Sequence[Tensor | None] | None = None,
    ) -> list[Output]:
        """Read tokens ``[n]`` after the keys of each request in one pass; feature ``[sum of n, H]``. Of text the output
        at the last token of each; of a level of drafts, with ``positions`` and ``seen`` as in ``attend_cached``, that
        at every node."""
        added = [len(each) for each in tokens]
        if positions is None:
            positions = [range(keys.length, keys.length + count) for keys, count in zip(requests, added, strict=True)]
        flat = list(chain.from_iterable(positions))
        cos, sin = self.rotary(max(flat) + 1, next(self.parameters()))
        here = torch.tensor(flat, device=cos.device)
        asked, masks = (added, seen) if seen is not None else ([1] * len(added), [None] * len(added))
        queries = slice(None) if seen is not None else torch.tensor([end - 1 for end in accumulate(added)]).to(here)

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts = zip(requests, query.split(asked), key.split(added), value.split(added), masks, strict=True)
            return torch.cat([attend_cached(*given) for given in parts])

        output = self._read(torch.cat(list(tokens)), feature, Attend(cos[here], sin[here], attention, queries))
        return [Output(*parts) for parts in zip(*(part.split(asked) for part in output), strict=True)]


def attend_cached(cache: RewindableCache, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
    """Append key and value ``[n, Hk, d]``; attend with the queries ``[m, Hq, d]`` of the last m positions. seen: bool
    ``[m, D]``, which of the last D positions each query may attend to (a draft tree), with all before; None: a single
    query, which sees everything."""
    assert seen is not None or len(query) == 1
    keys, values = cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0)  # [1, Hk, all, d]
    mask = None if seen is None else pad(seen, (keys.shape[2] - seen.shape[1], 0), value=True)
    attended = scaled_dot_product_attention(query.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1)


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
