"""The EAGLE head: its arguments, and its loss over the unrolled steps.

R = positions of the flat batch, N = positions of a pass, n = queries, H = hidden size (the target's), Vd = draft
vocabulary.

One ``read`` serves training (``forward.py``) and drafting (``drafting.py``): only the keys that it attends to differ.
The embedding is the target's: borrowed, never copied."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import LlamaConfig

from specdraft.decoding.compilation import Compilable
from specdraft.drafters.alignment import Alignment, StepDecay, align, count_supervised
from specdraft.drafters.base import Drafter, TrainingLoss, constructor_arguments
from specdraft.drafters.confidence import check_smoothing, weigh_by_confidence
from specdraft.drafters.draft_tree_builder import Vocabulary
from specdraft.drafters.eagle.compiled import run_layer
from specdraft.drafters.eagle.drafting import EagleDrafting, forward
from specdraft.drafters.eagle.forward import Attends, Output, unroll
from specdraft.drafters.layers import ROPE_BY_LENGTH
from specdraft.drafters.objective import objective
from specdraft.drafters.rotary import RotaryTable
from specdraft.errors import UserError
from specdraft.losses.chunked import Head, Step, Teacher
from specdraft.losses.divergence import divergence as divergence_of
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch


class EagleHead(Drafter):
    """A head of the family; a subclass says what the feature is, what the layer reads, and what is learned."""

    target: Target
    training_options = frozenset(
        {"ttt_steps", "ttt_growth", "step_decay", "sample_positions", "sequence_mean", "confidence_smoothing"}
        | {"divergence", "regression_weight", "distillation_weight"}
    )
    residual_widths: int = 8  # hidden states that a step keeps for backward beside attention and MLP
    num_layers: int = 1
    sliding_window: int | None = None  # positions that attention sees; None: all

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
        ttt_growth: float = 0.0,
        step_decay: float = 0.8,
        sample_positions: bool = False,
        sequence_mean: bool = False,
        confidence_smoothing: float | None = None,
        divergence: str | Mapping[str, Any] = "forward_kl",
        regression_weight: float = 0.0,
        distillation_weight: float = 1.0,
    ) -> None:
        """``ttt_growth``: over this first share of the training its steps grow from one to ``ttt_steps``.
        ``sequence_mean``: documents count alike in the loss, not positions. ``confidence_smoothing``: steps weigh what
        the draft's confidence says, see ``confidence.py``. The loss is the divergence of the logits and the smooth-L1
        distance to the target's own last hidden states, with their weights.
        Raises UserError for an unknown divergence, no training-time-test step, a growth that is no share, a decay that
        cannot be sampled, no such smoothing, weights of the loss's two parts that leave nothing to learn, and rotary
        angles that change with the length of the text."""
        arguments = constructor_arguments(locals())
        super().__init__()
        if rope_parameters.get("rope_type") in ROPE_BY_LENGTH:
            raise UserError(
                f"the head has rope_type={rope_parameters['rope_type']}, whose angles change with the length of the "
                "text: expected default, linear, llama3 or yarn, as for_target chooses"
            )
        if ttt_steps < 1:
            raise UserError(f"ttt_steps is {ttt_steps}: expected at least 1 step of the training-time test")
        if not 0 <= ttt_growth <= 1:
            raise UserError(f"ttt_growth is {ttt_growth}: expected a share of the training from 0 to 1")
        check_smoothing(confidence_smoothing, sample_positions)
        if min(regression_weight, distillation_weight) < 0 or regression_weight + distillation_weight == 0:
            given = f"regression_weight is {regression_weight} and distillation_weight {distillation_weight}"
            raise UserError(f"{given}: expected none below 0 and one above")
        self._arguments = arguments
        self.vocab_size, self.ttt_steps, self.ttt_growth = vocab_size, ttt_steps, ttt_growth
        self.sequence_mean, self.confidence_smoothing = sequence_mean, confidence_smoothing
        self.decay = StepDecay(step_decay, sample_positions)
        self.divergence = divergence_of(divergence)
        self.regression_weight, self.distillation_weight = regression_weight, distillation_weight
        of_layer = arguments.keys() - EagleHead.training_options - {"vocab_size"}
        self.layer_config = LlamaConfig(**{name: arguments[name] for name in of_layer})
        self.rotary = RotaryTable(self.layer_config)
        self.decoding_pass = Compilable(partial(forward, self), type(self).__name__)

    def bind(self, target: Target) -> None:
        """See ``Drafter``. vLLM gives a head without a window the target's, where all of its layers have one."""
        super().bind(target)
        if self._arguments.get("sliding_window") is None:  # no target is known whose window does not hold the steps
            self.sliding_window = window if (window := target.sliding_window or 0) > self.ttt_steps else None

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The draft vocabulary."""

    @abstractmethod
    def feature(self, features: Features) -> Tensor:
        """The target's features ``[B, T, ...]`` as the head reads them, ``[B * T, H]``."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, Vd]`` of ``hidden [n, H]``."""

    @abstractmethod
    def _layer(self, embedded: Tensor, feature: Tensor, attends: Attends) -> Output:
        """Of embedded, feature ``[N, H]`` the queries' output, through all layers."""

    @abstractmethod
    def _loss(self, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        """What the steps' hidden states are worth."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings ``[N, H]`` of tokens ``[N]``: the target's, unless the head has its own."""
        return nn.functional.embedding(tokens, self.target.embedding_weight)

    def read(self, tokens: Tensor, feature: Tensor, attends: Attends) -> Output:
        """The one forward of training and decoding: tokens ``[N]``, feature ``[N, H]`` -> the queries' output."""
        return run_layer(self, self._layer, self.embed(tokens).to(feature.dtype), feature, attends)

    @property
    def steps_now(self) -> int:
        """Of the training-time test: in training as many as its progress asks for, else all."""
        if not self.training or self.progress >= self.ttt_growth:
            return self.ttt_steps
        return 1 + int((self.ttt_steps - 1) * self.progress / self.ttt_growth)

    def count_supervised(self, batch: Batch) -> Tensor:
        """Of every step."""
        return count_supervised(batch, self.steps_now, self.sequence_mean)

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """Training-time test: per step the mean loss over its supervised positions, times decay^step; where positions
        are sampled, an estimate of that. Validation takes all."""
        self.bind(target)
        decay = self.decay if self.training else StepDecay(self.decay.base)
        alignment = align(batch, self.steps_now, decay, self.sequence_mean)
        labels = alignment.tokens[1 : 1 + batch.input_ids.numel()]  # [R], after position r comes token r+1
        teacher = Teacher(features.last.flatten(0, 1), target.logits, self.vocabulary.ids, labels)
        steps = self._unroll(alignment, self.feature(features), decay)
        for step, total in zip(steps, totals or (), strict=totals is not None):
            step.total = total
        return self._loss(steps, teacher)

    @property
    def passes(self) -> float:
        """Of a position through the layer in a training step, on average, once the steps have grown."""
        return sum(self.decay.share(step) for step in range(self.ttt_steps))

    def _learn(self, heads: Sequence[Head], steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        """The steps' loss, their hidden states projected by ``heads``; metrics count both parts."""
        if self.confidence_smoothing is not None:
            steps = weigh_by_confidence(heads, teacher, steps, self.confidence_smoothing)
        distilled = objective(heads, teacher, steps, self.divergence)
        if self.regression_weight == 0:
            return distilled._replace(loss=self.distillation_weight * distilled.loss)
        loss, metrics = self.distillation_weight * distilled.loss, dict(distilled.metrics)
        for index, step in enumerate(steps):
            wanted = teacher.last[step.positions].to(step.hidden.dtype)  # [n, H]
            distances = smooth_l1_loss(step.hidden, wanted, reduction="none").mean(-1)  # [n]
            loss = loss + self.regression_weight * step.scale * step.shared(distances).sum()
            metrics[f"step_{index}/regression_sum"] = distances.detach().sum()
        return TrainingLoss(loss, metrics, distilled.drafted)

    def _unroll(self, alignment: Alignment, feature: Tensor, decay: StepDecay) -> list[Step]:
        angles = self.rotary(alignment.length + len(alignment.counts) - 1, next(self.parameters()))
        return unroll(self.read, alignment, feature, angles, decay, self.num_layers, self.sliding_window)

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """The matrices and the attention, once per pass."""
        forward, backward = super().training_flops(sequence_length)
        config = self.layer_config
        seen = min(sequence_length, 2 * (self.sliding_window or sequence_length)) / 2  # on average
        attention = 4.0 * self.num_layers * config.num_attention_heads * config.head_dim * seen
        return self.passes * (forward + attention), self.passes * (backward + 2.0 * attention)

    def activation_bytes(self, tokens: int, element: int) -> float:
        """The layer's inputs at every pass, and the target's features."""
        config, hidden = self.layer_config, self.layer_config.hidden_size
        attention = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        inner = (3 if self.compiled else 2) * config.intermediate_size  # a compiler keeps the gated product too
        # residuals, what norms and matrices read, embedding; q k v and rotated q k, attention out; gated MLP
        per_pass = self.residual_widths * hidden + self.num_layers * (2 * attention + inner)
        return float((self.passes * per_pass + max(1, len(self.layers)) * hidden) * tokens * element)

    def drafting(self, rows: int, capacity: int) -> EagleDrafting:
        """See ``Drafter``."""
        return EagleDrafting(self, rows, capacity)
