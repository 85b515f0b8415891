"""Drafting from one hidden state of the target and the tokens since: what Medusa, Hydra and ReDrafter share.

R = positions of the flat batch, n = positions of a step, H = hidden size, Vd = draft vocabulary.

- Position r's hidden state is the one after the final norm, from which the target itself predicts token r+1. Step i
  predicts token r+2+i from it, so that one target pass is drafted from however long the draft is.
- A projection starts from the target's own rows: an untrained drafter says what the target says at its position
  (2401.10774, section 2.1).
- The logit scale of a target (Cohere, Granite) is part of those first rows, because serving engines apply none to a
  head. A soft-cap cannot be part of a linear projection; it keeps the order of tokens, and training fits the rest."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from specdraft.decoding.passes import Texts
from specdraft.drafters.alignment import Alignment, StepDecay, align, count_supervised
from specdraft.drafters.base import Drafter, TrainingLoss
from specdraft.drafters.confidence import check_smoothing, weigh_by_confidence
from specdraft.drafters.drafting import LevelDrafting
from specdraft.drafters.objective import DraftHead, call_with_weights, objective
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.losses.chunked import Step, Teacher
from specdraft.losses.divergence import divergence as find_divergence
from specdraft.onednn import plain
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch


class ResidualBlock(nn.Module):
    """Layers x + SiLU(Wx + b); the first may read more than the residual stream x."""

    def __init__(self, hidden_size: int, num_layers: int, num_read: int = 1) -> None:
        """The first layer reads ``num_read`` vectors of ``hidden_size``, of which the first is the stream."""
        super().__init__()
        self.hidden_size = hidden_size
        widths = [num_read * hidden_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.Linear(width, hidden_size) for width in widths)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, read: Tensor) -> Tensor:
        """``[n, num_read * H]`` -> ``[n, H]``."""
        stream = read[..., : self.hidden_size]
        for layer in self.layers:
            read = stream = stream + nn.functional.silu(layer(read))
        return stream


class LastState(DraftVocabulary, Drafter):
    """A drafter that is unrolled for some steps in training; a subclass says what each step projects, and by what. d2t
    and t2d are kept with the weights where the vocabulary is pruned."""

    target: Target
    reads_every_last = False

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        draft_vocab_size: int,
        num_steps: int,
        decay: StepDecay,
        sequence_mean: bool,
        confidence_smoothing: float | None,
        divergence: str | dict[str, Any],
    ) -> None:
        """``decay``: what step i weighs in the loss, or which share of the positions it learns from; or it weighs what
        the draft's confidence says (``confidence_smoothing``, see ``confidence.py``). ``sequence_mean``: documents
        count alike, not positions. Raises UserError for an unknown divergence, no such smoothing, or a draft vocabulary
        larger than the vocabulary."""
        super().__init__()
        self.hidden_size, self.num_steps, self.decay = hidden_size, num_steps, decay
        check_smoothing(confidence_smoothing, decay.sampled)
        self.sequence_mean, self.confidence_smoothing = sequence_mean, confidence_smoothing
        self.divergence = find_divergence(divergence)
        self.register_vocabulary(vocab_size, draft_vocab_size, persistent=draft_vocab_size < vocab_size)

    @classmethod
    def for_target(cls, target: Target, draft_vocabulary: Tensor | None = None, **options: Any) -> Self:
        """A drafter for ``target``; ``draft_vocabulary``: ascending target ids ``[Vd]``, None for the whole one."""
        size = target.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
        drafter = cls(target.hidden_size, target.vocab_size, size, **options)
        if draft_vocabulary is not None:
            drafter.set_draft_vocabulary(draft_vocabulary)
        rows = plain(target.head.weight.detach())[drafter.draft_ids.to(target.device)] * target.logit_scale  # [Vd, H]
        width = min(target.hidden_size, drafter.projections[0].in_features)
        for head in drafter.projections:
            head.weight.data.zero_()[:, :width].copy_(rows[:, :width])
        drafter.bind(target)
        return drafter

    @property
    @abstractmethod
    def projections(self) -> list[DraftHead]:
        """One for every step, or one for all. Wider than H, the first H of what they project stand for the state."""

    @abstractmethod
    def unrolled(self, last: Tensor, alignment: Alignment) -> list[Tensor]:
        """What each step projects of its supervised positions, ``[n, ...]`` for each; ``last [R, H]``. A step of no
        positions calls the same modules: other ranks wait for its gradient."""

    def count_supervised(self, batch: Batch) -> Tensor:
        """Of every step."""
        return count_supervised(batch, self.num_steps, self.sequence_mean)

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """Per step the mean divergence over its supervised positions, times its weight, or in training an estimate of
        it from sampled ones. The teacher of step i at position r is the target's distribution at r+1+i."""
        self.bind(target)
        decay = self.decay if self.training else StepDecay(self.decay.base)
        alignment = align(batch, self.num_steps, decay, self.sequence_mean)
        last, projections = features.last.flatten(0, 1), self.projections  # [R, H]
        steps = []
        for step, (at, hidden) in enumerate(zip(alignment.supervised, self.unrolled(last, alignment), strict=True)):
            total = alignment.counts[step] if totals is None else totals[step]
            shares = None if alignment.shares is None else alignment.shares[step]
            head = min(step, len(projections) - 1)
            steps.append(Step(hidden, at + 1 + step, decay.weight(step), head, total, shares))
        labels = alignment.tokens[1 : 1 + len(last)]
        teacher = Teacher(last, target.logits, self.vocabulary.ids, labels)

        def loss(weights: list[Tensor]) -> TrainingLoss:
            weighed = steps
            if self.confidence_smoothing is not None:
                weighed = weigh_by_confidence(weights, teacher, steps, self.confidence_smoothing)
            return objective(weights, teacher, weighed, self.divergence)

        return call_with_weights(projections, loss)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype


class LastStateDrafting(LevelDrafting):
    """Of each request the newest position's hidden state ``[rows, H]``, and the token ``[rows]`` that was emitted from
    it; nothing earlier is read."""

    def __init__(self, drafter: LastState, rows: int) -> None:
        self.vocabulary = drafter.vocabulary
        device = next(drafter.parameters()).device
        self.last = torch.zeros(rows, drafter.hidden_size, dtype=drafter.dtype, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """The newest position is all that a draft begins with."""
        rows = slice(texts.first, texts.first + len(tokens))
        newest = (counts - 1)[:, None]
        self.last[rows] = features.take(newest).last[:, 0].to(self.last.dtype)
        self.token[rows] = tokens.gather(1, newest)[:, 0]

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.last[row], self.token[row] = self.last[last], self.token[last]
