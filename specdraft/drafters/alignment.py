"""Which position predicts what: the pairing of features and tokens in the training-time test, stated once.

A packed batch ``[B, T]`` is read as one flat sequence of R = B*T positions:

    at step s the head sees feature r (its own output from step 1 on) and token r+1+s, at rotary position pos(r)+s,
    and predicts token r+2+s, so that its teacher is the target's distribution at position r+1+s.

That is what happens when serving: the target has emitted token r+1 from feature r; the head drafts r+2, r+3, ...
(EAGLE-3, 2503.01840, section 3.2.)"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.targets.batch import Batch


class Alignment(NamedTuple):
    """tokens: ``[R + S]`` flat ids (padded). positions: ``[R]`` rotary positions. starts: ``[R]`` first position of
    each one's document. supervised: per step the ascending positions ``[n_s]`` to learn from, a subset of the step
    before."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    supervised: list[Tensor]


def count_supervised(batch: Batch, num_steps: int) -> Tensor:
    """How many positions are supervised at each step, ``[num_steps]``."""
    return torch.tensor([len(supervised) for supervised in align(batch, num_steps).supervised])


def align(batch: Batch, num_steps: int) -> Alignment:
    """Align a batch for ``num_steps`` steps.
    Position r is supervised at step s if tokens r+1 .. r+2+s are all to be learned and of r's own document: r+1 because
    a draft only ever starts after a token that the target emitted, the rest because drafting has gone on until there.
    """
    size, width = batch.input_ids.numel(), batch.document_ids.shape[1]
    index = torch.arange(size, device=batch.input_ids.device)
    ids = batch.document_ids.flatten()
    # A document begins where the id changes or a sequence begins; padding is a document nobody is asked about.
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[1:] = (ids[1:] != ids[:-1]) | (index[1:] % width == 0)
    starts = torch.where(begins, index, 0).cummax(0).values
    beyond = starts.new_zeros(num_steps + 1)
    document = torch.cat([starts, beyond])  # [R + S + 1]
    learned = torch.cat([batch.loss_mask.flatten() & (ids >= 0), beyond.bool()])

    def follows(offset: int) -> Tensor:
        there = slice(offset, offset + size)
        return learned[there] & (document[there] == document[:size])

    alive, supervised = follows(1), []
    for step in range(num_steps):
        alive = alive & follows(2 + step)
        supervised.append(alive.nonzero()[:, 0])
    tokens = torch.cat([batch.input_ids.flatten(), batch.input_ids.new_zeros(num_steps)])
    return Alignment(tokens, batch.position_ids.flatten(), starts, supervised)
