"""Domino (2605.29707): DFlash corrected by a recurrent state of the anchor and what was drafted behind it.

A = blocks, K = drafted tokens, N = prefixes, t = their tokens, H = hidden size, g = size of the state, r = width of the
correction, Vd = draft vocabulary.

- A GRU without biases reads the target's embeddings of the tokens in a block, the anchor first; its state and the
  slot's hidden state make what is added to the slot's logits: ``projection SiLU(mix [h; state])``. The projection
  begins as zeros, so that an untrained correction adds nothing.
- Embeddings are brought to unit RMS before they are read, as in Hydra and for its reason.
- The loss is a mean of that of the corrected logits and that of the base alone, whose weight falls from one to zero as
  training goes on: the base learns to stand by itself before it learns to be corrected. Validation is of the corrected
  logits alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu

from specdraft.drafters.base import TrainingLoss, constructor_arguments
from specdraft.drafters.dflash.dflash import Slots
from specdraft.drafters.dflash.sequential import Sequential
from specdraft.drafters.objective import DraftHead, call_with_weights, step_metrics
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, Teacher, distillation_loss


class Recurrence(nn.Module):
    """A GRU without biases, of plain linear layers: torch's own packs its weights, which ZeRO-3 takes apart."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.of_token = nn.Linear(width, 3 * size, bias=False)
        self.of_state = nn.Linear(size, 3 * size, bias=False)
        for layer in (self.of_token, self.of_state):
            nn.init.uniform_(layer.weight, -(size**-0.5), size**-0.5)  # as torch's own

    def forward(self, read: Tensor, state: Tensor | None) -> Tensor:
        """The states ``[N, t, g]`` after each of ``read [N, t, width]``, from ``state [N, g]``; None is zeros."""
        given = self.of_token(read)  # [N, t, 3g]
        state = given.new_zeros(len(given), given.shape[-1] // 3) if state is None else state
        states = []
        for gates in given.unbind(1):
            reset, update, new = gates.chunk(3, -1)
            before_reset, before_update, before_new = self.of_state(state).chunk(3, -1)
            candidate = torch.tanh(new + torch.sigmoid(reset + before_reset) * before_new)
            state = torch.lerp(candidate, state, torch.sigmoid(update + before_update))
            states.append(state)
        return torch.stack(states, dim=1)


class ResidualHead(nn.Module):
    """The recurrence and what makes a correction of its state."""

    def __init__(self, hidden_size: int, draft_vocab_size: int, gru_size: int, rank: int) -> None:
        super().__init__()
        self.gru = Recurrence(hidden_size, gru_size)
        self.mix = nn.Linear(hidden_size + gru_size, rank, bias=False)
        self.projection = DraftHead(rank, draft_vocab_size, bias=False)
        nn.init.zeros_(self.projection.weight)

    def forward(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Of slots ``[..., H]`` and states ``[..., g]`` what is projected, ``[..., r]``."""
        return silu(self.mix(torch.cat([hidden, state], dim=-1)))


class Domino(Sequential):
    """The block drafter with a residual head; no engine serves it."""

    def __init__(self, gru_size: int = 512, rank: int = 256, **shared: Any) -> None:
        """``gru_size``: numbers of the state. ``rank``: width of the correction. ``shared`` is what ``DFlash`` takes.
        Raises UserError as it does, and for sizes below 1."""
        arguments = constructor_arguments(locals())
        super().__init__(**shared)
        for name, value in (("gru_size", gru_size), ("rank", rank)):
            if value < 1:
                raise UserError(f"model.drafter.{name} is {value}: expected at least 1")
        self._arguments |= arguments
        self.residual_head = ResidualHead(self.layer_config.hidden_size, len(self.d2t), gru_size, rank)

    @property
    def projection(self) -> DraftHead:
        """See ``Sequential``."""
        return self.residual_head.projection

    def read_prefix(self, tokens: Tensor, state: Tensor | None = None) -> Tensor:
        """See ``Sequential``."""
        embedded = embedding(tokens, self.target.embedding_weight).to(self.fc.weight.dtype)  # [N, t, H]
        return self.residual_head.gru(rms_norm(embedded, embedded.shape[-1:], eps=1e-6), state)

    def correction(self, hidden: Tensor, state: Tensor) -> Tensor:
        """See ``Sequential``."""
        return self.residual_head(hidden, state)

    def correcting_matrices(self) -> list[Tensor]:
        """See ``Sequential``."""
        return [matrix for matrix in self.residual_head.parameters() if matrix.ndim == 2]

    @property
    def base_share(self) -> float:
        """Of the base alone in the loss, now."""
        return 1 - self.progress if self.training else 0.0

    def _learn(self, slots: Slots, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        corrected = self.corrected(steps, slots, self.read_prefix(slots.before))
        share = self.base_share

        def loss(weights: list[Tensor]) -> TrainingLoss:
            weighed = self._weigh(weights, teacher, corrected)
            final = [replace(step, weight=(1 - share) * step.weight) for step in weighed]
            base = [replace(step, weight=share * step.weight, correction=None) for step in weighed] if share else []
            total, results = distillation_loss(weights, teacher, [*final, *base], self.divergence)
            drafted = final[0].positions, results[0].matched
            return TrainingLoss(total, step_metrics(final, results[: len(final)]), drafted)

        return call_with_weights([self.lm_head, self.projection], loss)

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """With the base's logits, which are projected once more."""
        forward, backward = super().training_flops(sequence_length)
        head = 2.0 * self.share_kept(sequence_length) * self.num_drafts * self.lm_head.weight.numel()
        return forward + head, backward + head * (2 if self.lm_head.weight.requires_grad else 1)
