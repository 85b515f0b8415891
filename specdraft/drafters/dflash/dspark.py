"""DSpark (2607.05147): DFlash whose anchor drafts too, corrected by the token before each slot, and a confidence.

A = blocks, K = drafted tokens, H = hidden size, r = rank, V / Vd = target / draft vocabulary.

- Every slot drafts the token after its own place, the anchor's slot the first: a block of K slots drafts K tokens.
- The Markov head adds ``W2 W1[t]`` to a slot's logits, t being the token before the one that it drafts: a table of all
  pairs of tokens, of rank r. ``W2`` begins as zeros, so that an untrained head says what DFlash says.
- The confidence head says how likely a slot's token is to be accepted, ``sigmoid(Linear[h; W1[t]])``. It learns what is
  accepted, the sum of min(p, q), by binary cross entropy. It changes no draft: engines that size their verification by
  it read it.
- Names and equations are those of vLLM's ``Qwen3DSparkModel``."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from specdraft.drafters.base import TrainingLoss, constructor_arguments
from specdraft.drafters.dflash.dflash import DFlash, Slots
from specdraft.drafters.dflash.sequential import Sequential
from specdraft.drafters.objective import DraftHead, call_with_weights, step_metrics
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, Teacher, distillation_loss


class MarkovHead(nn.Module):
    """``markov_w1 [V, r]`` embeds a token of the target's, ``markov_w2 [Vd, r]`` projects it."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = DraftHead(rank, draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """The log odds of a slot's token being accepted; at first even."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Of slots ``[..., H]`` and what ``markov_w1`` makes of the tokens before, ``[..., r]``: ``[...]``."""
        return self.proj(torch.cat([hidden, embedded], dim=-1))[..., 0]


class DSpark(Sequential):
    """The block drafter with a Markov head; vLLM's method ``dspark`` loads it."""

    first_slot: ClassVar[int] = 0
    training_options = DFlash.training_options | {"confidence_weight"}

    def __init__(
        self, markov_rank: int = 256, confidence_head: bool = True, confidence_weight: float = 1.0, **shared: Any
    ) -> None:
        """``markov_rank``: of the table of pairs. ``confidence_head``: whether there is one, whose loss counts
        ``confidence_weight``. ``shared`` is what ``DFlash`` takes; ``block_size`` may be 1. Raises UserError as it
        does, and for a rank below 1 or a negative weight."""
        arguments = constructor_arguments(locals())
        super().__init__(**shared)
        if markov_rank < 1:
            raise UserError(f"model.drafter.markov_rank is {markov_rank}: expected at least 1")
        if confidence_weight < 0:
            raise UserError(f"model.drafter.confidence_weight is {confidence_weight}: expected 0 or a positive number")
        self._arguments |= arguments
        self.confidence_weight = confidence_weight
        width = self.layer_config.hidden_size
        self.markov_head = MarkovHead(self.vocab_size, len(self.d2t), markov_rank)
        self.confidence_head = ConfidenceHead(width, markov_rank) if confidence_head else None

    @property
    def projection(self) -> DraftHead:
        """See ``Sequential``."""
        return self.markov_head.markov_w2

    def read_prefix(self, tokens: Tensor, state: Tensor | None = None) -> Tensor:
        """See ``Sequential``: the last token is all that counts."""
        return self.markov_head.markov_w1(tokens)

    def correction(self, hidden: Tensor, state: Tensor) -> Tensor:
        """See ``Sequential``: the embedded token, whatever the slot."""
        return state

    def correcting_matrices(self) -> list[Tensor]:
        """See ``Sequential``."""
        confidence = [] if self.confidence_head is None else [self.confidence_head.proj.weight]
        return [self.projection.weight, *confidence]

    def _learn(self, slots: Slots, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        embedded = self.read_prefix(slots.before)  # [A, K, r]
        corrected = self.corrected(steps, slots, embedded)
        odds = None if self.confidence_head is None else self.confidence_head(slots.hidden, embedded)  # [A, K]

        def loss(weights: list[Tensor]) -> TrainingLoss:
            weighed = self._weigh(weights, teacher, corrected)
            total, results = distillation_loss(weights, teacher, weighed, self.divergence)
            metrics = step_metrics(weighed, results)
            for index, (step, rows, result) in enumerate(zip(weighed, slots.rows, results, strict=True)):
                if odds is None:
                    break
                said = odds[rows, index].to(result.alpha.dtype)  # [n]
                values = binary_cross_entropy_with_logits(said, result.alpha, reduction="none")
                total = total + self.confidence_weight * step.scale * step.shared(values).sum()
                metrics[f"step_{index}/confidence_error_sum"] = (said.detach().sigmoid() - result.alpha).abs().sum()
            return TrainingLoss(total, metrics, (weighed[0].positions, results[0].matched))

        return call_with_weights([self.lm_head, self.projection], loss)
