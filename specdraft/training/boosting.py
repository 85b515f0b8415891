"""Drafters that learn what earlier ones miss, for an ensemble (SpecInfer, 2305.09781, section 3: boost-tuning).

B = sequences, T = tokens of a sequence, R = B * T."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, drafter_class, load_drafter
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch


def check_earlier(checkpoints: str | Sequence[str]) -> None:
    """Raises UserError for a checkpoint that is not there, for a drafter that was never trained, and for one of a kind
    whose loss does not tell what it drafts right. Its class says so: nothing is loaded."""
    if unknown := [name for name in _names(checkpoints) if not isinstance(name, str)]:
        raise UserError(f"boost names {unknown[0]!r}: expected paths of checkpoints, as boost=RUN or boost=[RUN, RUN]")
    for name in _names(checkpoints):
        kind = drafter_class(name)
        if kind.training_loss is Drafter.training_loss:
            raise UserError(f"boost={name} is {kind.family}, which has no training: expected a trained drafter")
        if not kind.tells_hits:
            wrong = f"boost={name} is {kind.family}, whose loss does not tell what it drafts right"
            raise UserError(f"{wrong}: expected a drafter of another kind, as eagle3, medusa or draft")


@dataclass(frozen=True)
class Earlier:
    """Frozen drafters whose hits are left out of a loss."""

    drafters: Sequence[Drafter]

    @classmethod
    def of(cls, checkpoints: str | Sequence[str], drafter: Drafter, target: Target, stored: bool = False) -> "Earlier":
        """Load them for the training of ``drafter``, on hidden states that the target makes or, ``stored``, a store has
        for ``drafter``. They are such as ``check_earlier`` lets pass. Raises UserError for one of another target, and
        for one that reads other hidden states."""
        found = []
        for name in _names(checkpoints):
            earlier, about = load_drafter(name)
            check_target(about, target)
            if tuple(earlier.layers) not in ((), tuple(drafter.layers)):
                wanted = f"those of the drafter that is trained, {list(drafter.layers)}"
                raise UserError(f"boost={name} reads the target's layers {list(earlier.layers)}: expected {wanted}")
            if stored and earlier.reads_every_last and not drafter.reads_every_last:
                wanted = "data.store=null, as the drafter that is trained does not read them"
                raise UserError(f"boost={name} reads the last hidden states of prompts: expected {wanted}")
            earlier.bind(target)
            found.append(earlier)
        return cls(found)

    @torch.no_grad()
    def missed(self, batch: Batch, features: Features, target: Target) -> Batch:
        """The batch, without the tokens that one of them drafts right as the first of a draft: that its most likely
        token, after the target's own text, is the target's. Divisors count them still, so that a batch with more hits
        weighs less. Each earlier drafter takes a forward pass. What a store holds of the batch is read by now."""
        learned = batch.loss_mask.clone(memory_format=torch.contiguous_format)  # a mask may be expanded
        flat = learned.view(-1)  # [R]
        for drafter in self.drafters:
            drafted = drafter.to(features.last.device).training_loss(batch, features, target).drafted
            if drafted is None:
                raise UserError(f"boost: {drafter.family} does not tell what it drafts right: expected another drafter")
            positions, right = drafted
            flat[(positions + 1)[right]] = False  # a position tells of the token after it
        return replace(batch, loss_mask=learned)


def _names(checkpoints: str | Sequence[str]) -> Sequence[str]:
    return checkpoints if isinstance(checkpoints, Sequence) and not isinstance(checkpoints, str) else [checkpoints]
