"""PARD (2504.18583): an independent draft model that reads masks in the place of what is drafted.

R = positions of the flat batch, n = positions of a step, H = the draft's hidden size, K = drafted tokens.

- The first token of a draft comes as from any draft model, after the last emitted token. For each further one the model
  reads the mask, a token that no text holds, at the position of the token that is not there: one pass for K tokens.
- A mask sees the text and the masks before it, so that what is drafted knows nothing of the tokens drafted before it.
- A step learns from ever fewer positions, always among those of the step before (the paper's conditional drop; 0.7 of
  those of the step before it, a fifth at least), so that every mask finds all masks before its own.

Which position is learned at which step is said in ``alignment.py``, as for the drafters that read the target: a draft
begins after a token that the target emitted. So step 0, the model's own next token, is trained beside the others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from specdraft.drafters.alignment import StepDecay, align, count_supervised
from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.mask_token import check_mask_token
from specdraft.drafters.mask_token import mask_token as mask_token_of
from specdraft.drafters.pard.drafting import ParallelDrafting
from specdraft.drafters.pard.masked_text import MaskedText
from specdraft.errors import UserError
from specdraft.losses.chunked import Step
from specdraft.targets import Target
from specdraft.targets.batch import Batch

LEAST_SHARE = 0.2


class Pard(DraftModel):
    """The parallel draft model; vLLM's method ``draft_model`` loads it with ``parallel_drafting``."""

    quantizable = False
    training_options = DraftModel.training_options | {"step_decay", "sample_positions"}

    def __init__(
        self,
        mask_token: int,
        num_drafts: int = 8,
        step_decay: float = 0.7,
        sample_positions: bool = True,
        **shared: Any,
    ) -> None:
        """``mask_token``: an id that no text holds. ``num_drafts``: tokens of the longest draft. Step s learns from
        ``step_decay**s`` of its positions, or, without ``sample_positions``, from all of them with that weight.
        ``shared`` is what ``DraftModel`` takes. Raises UserError as ``DraftModel`` does, for a mask that is no token,
        for drafts of no token, and for a share that is none."""
        arguments = constructor_arguments(locals())
        super().__init__(**shared)
        check_mask_token(mask_token, self.language_model.vocab_size)
        if num_drafts < 1:
            raise UserError(f"model.drafter.num_drafts is {num_drafts}: expected at least 1 token")
        self._arguments |= arguments
        self.mask_token, self.num_drafts = mask_token, num_drafts
        self.decay = StepDecay(step_decay, sample_positions, floor=LEAST_SHARE)

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        *start: Any,
        mask_token: int | None = None,
        **options: Any,
    ) -> Self:
        """As ``DraftModel.for_target``; mask_token: None for one that no text has."""
        mask = mask_token_of(target.tokenizer, target.vocab_size) if mask_token is None else mask_token
        return super().for_target(target, draft_vocabulary, *start, mask_token=mask, **options)

    def count_supervised(self, batch: Batch) -> Tensor:
        """Of every token of a draft."""
        return count_supervised(batch, self.num_drafts)

    def _steps(self, batch: Batch, totals: Sequence[float] | None) -> list[Step]:
        """A step for every token of a draft, at positions that the next token is drafted from."""
        decay = self.decay if self.training else replace(self.decay, sampled=False)
        alignment = align(batch, self.num_drafts, decay)
        text, model = MaskedText(alignment, self.mask_token), self.language_model
        last = model.masked_features(text.ids, text.positions, text.attend, text.visible).last[0]  # [R + M, H]
        hidden = list((last * model.logit_scale).split(text.parts))
        hidden[0] = hidden[0][alignment.supervised[0] + 1]
        hidden += [last[:0]] * (self.num_drafts - len(hidden))  # nobody is asked so far from here
        totals = alignment.counts if totals is None else totals
        places = zip(hidden, alignment.supervised, totals, strict=True)
        return [
            Step(each, at + 1 + step, decay.weight(step), total=total) for step, (each, at, total) in enumerate(places)
        ]

    @property
    def _reading(self) -> float:
        """Tokens that training reads for every one of the text."""
        return 1.0 + sum(self.decay.share(step) for step in range(1, self.num_drafts))

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """Of the text and of the masks."""
        forward, backward = super().training_flops(sequence_length)
        return self._reading * forward, self._reading * backward

    def activation_bytes(self, tokens: int, element: int) -> float:
        """Of the text and of the masks."""
        return self._reading * super().activation_bytes(tokens, element)

    def drafting(self, rows: int, capacity: int) -> ParallelDrafting:
        """See ``Drafter``."""
        return ParallelDrafting(self.language_model, self.mask_token, self.num_drafts, rows, capacity)
