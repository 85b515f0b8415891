"""Which position predicts what: the pairing of features and tokens in the training-time test, stated once.

A packed batch ``[B, T]`` is read as one flat sequence of R = B*T positions:

    at step s the head sees feature r (its own output from step 1 on) and token r+1+s, at rotary position pos(r)+s,
    and predicts token r+2+s, so that its teacher is the target's distribution at position r+1+s.

That is what happens when serving: the target has emitted token r+1 from feature r; the head drafts r+2, r+3, ...
(EAGLE-3, 2503.01840, section 3.2.)"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.errors import UserError
from specdraft.targets.batch import Batch


class Documents(NamedTuple):
    """Where the D documents of a flat batch lie, and which of their positions are queries: from the first that is
    supervised at step 0 to the end, packed one document after the other; of one without any, none.
    table: ``[2, D + 1]`` int32, at which packed position and at which of the batch each begins, and the two ends.
    longest: positions of the longest document. packed: how many queries there are."""

    table: Tensor
    longest: int
    packed: int

    def whole(self, size: int) -> "Documents":
        """The same documents of ``size`` positions, all of them queries."""
        return Documents(self.table[1].expand(2, -1), self.longest, size)


class Alignment(NamedTuple):
    """tokens: ``[R + S]`` flat ids (padded). positions: ``[R]`` rotary positions, all below ``length``. supervised: per
    step the ascending positions ``[n_s]`` to learn from, a subset of the step before. counts: how many they are, before
    some were drawn. Where documents count alike, counts are the documents that have any, and shares ``[n_s]`` one over
    the positions that a position's document has; else shares are None."""

    tokens: Tensor
    positions: Tensor
    length: int
    documents: Documents
    supervised: list[Tensor]
    counts: list[int]
    shares: list[Tensor] | None


def count_supervised(batch: Batch, num_steps: int, by_document: bool = False) -> Tensor:
    """How many positions are supervised at each step, ``[num_steps]``, or documents that have such."""
    return torch.tensor(align(batch, num_steps, by_document=by_document).counts)


@dataclass(frozen=True)
class StepDecay:
    """How much less later steps count: step s weighs ``base**s``; or, ``sampled``, that is the share of its positions
    that it learns from, drawn by chance, each with weight one. The expected loss is the same, for less arithmetic.
    kept: the share of the positions that any step learns from, also drawn by chance, which weigh the more. floor: what
    no step counts less than."""

    base: float
    sampled: bool = False
    kept: float = 1.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Raises UserError for a base that is no share."""
        if self.sampled and not 0 <= self.base <= 1:
            raise UserError(f"with sample_positions a decay of {self.base} is a share: expected a number from 0 to 1")

    @property
    def draws(self) -> bool:
        """Whether positions are drawn by chance."""
        return self.sampled or self.kept < 1

    def weight(self, step: int) -> float:
        """Of a step in the loss."""
        return (1.0 if self.sampled else self._counts(step)) / self.kept

    def share(self, step: int) -> float:
        """Of a step's positions that are learned from."""
        return (self._counts(step) if self.sampled else 1.0) * self.kept

    def _counts(self, step: int) -> float:
        return max(self.base**step, self.floor)


def align(
    batch: Batch,
    num_steps: int,
    decay: StepDecay = StepDecay(1.0),  # it is frozen
    by_document: bool = False,
) -> Alignment:
    """Align a batch for ``num_steps`` steps.
    Position r is supervised at step s if tokens r+1 .. r+2+s are all to be learned and of r's own document: r+1 because
    a draft only ever starts after a token that the target emitted, the rest because drafting has gone on until there.
    decay: where it samples, torch's own generator draws once per position, as for dropout, so that a step's positions
    are among those of the step before. by_document: every document counts alike, however long, not every position.
    """
    size, width = batch.input_ids.numel(), batch.document_ids.shape[1]
    device = batch.input_ids.device
    # One copy to the host, where lengths are decided: on a GPU every ``nonzero`` would wait for all that is queued.
    ids, mask, positions = torch.stack([batch.document_ids, batch.loss_mask, batch.position_ids]).flatten(1).cpu()
    index = torch.arange(size)
    # A document begins where the id changes or a sequence begins; padding is a document nobody is asked about.
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[1:] = (ids[1:] != ids[:-1]) | (index[1:] % width == 0)
    number = begins.cumsum(0)
    beyond = number.new_zeros(num_steps + 1)
    document = torch.cat([number, beyond])  # [R + S + 1]
    learned = torch.cat([mask.bool() & (ids >= 0), beyond.bool()])

    def follows(offset: int) -> Tensor:
        there = slice(offset, offset + size)
        return learned[there] & (document[there] == document[:size])

    alive, chance = follows(1), torch.rand(size) if decay.draws else torch.zeros(size)  # in [0, 1)
    supervised, counts, shares = [], [], []
    for step in range(num_steps):
        alive = alive & follows(2 + step)
        supervised.append((alive & (chance < decay.share(step))).nonzero()[:, 0])
        own = number[alive].bincount()  # positions of each document
        counts.append(int(own.count_nonzero() if by_document else own.sum()))
        shares.append(1 / own[number[supervised[-1]]].double())
    tokens = torch.cat([batch.input_ids.flatten(), batch.input_ids.new_zeros(num_steps)])
    # Where nothing is to be learned one position is read and not counted: under ZeRO-3 all ranks call the same modules.
    documents = _documents(begins, supervised[0] if counts[0] else index[:1], device)
    sizes = [len(each) for each in supervised]
    there = list(torch.cat(supervised).to(device).split(sizes))
    split = list(torch.cat(shares).to(device).split(sizes)) if by_document else None
    length = int(positions.max()) + 1
    return Alignment(tokens, batch.position_ids.flatten(), length, documents, there, counts, split)


def _documents(begins: Tensor, queries: Tensor, device: torch.device) -> Documents:
    """begins: bool ``[R]``, where a document does. queries: ``[n]`` ascending."""
    bounds = torch.cat([begins.nonzero()[:, 0], torch.tensor([len(begins)])])  # [D + 1]
    number = begins.cumsum(0)[queries] - 1
    first = bounds[1:].scatter_reduce(0, number, queries, "amin")  # [D]
    packed = torch.cat([bounds[:1], (bounds[1:] - first).cumsum(0)])  # [D + 1]
    return Documents(torch.stack([packed, bounds]).int().to(device), int(bounds.diff().max()), int(packed[-1]))
