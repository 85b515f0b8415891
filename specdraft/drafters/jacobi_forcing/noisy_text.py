"""What Jacobi Forcing reads in training: a packed batch, and behind it the guesses of Jacobi states.

R = positions of the flat batch, D = documents, A = blocks with as many guesses, S = guesses of each, M = all guesses, N
= R + M, Hq / Hk = query / key-value heads, d = head size.

The text to be learned is cut into blocks. A block is a state of Jacobi decoding: its first tokens are right, the others
are guesses. How many are guesses rises from block to block of a document, and begins again (2512.14681, its noise
schedule). The right ones are the clean text's own, which stand there anyway: a guess sees the text up to its anchor,
the last right token before it, and the guesses of its block up to itself. That is how DFlash's blocks attend, and no
mask ``[N, N]`` is made; ``visible`` is that mask, which the attention is compared with, and which architectures are
given that ask for more than plain attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.drafters.alignment import align
from specdraft.drafters.dflash.block_attention import Blocks
from specdraft.targets.batch import Batch
from specdraft.targets.packed_attention import by_document


@dataclass(frozen=True)
class Schedule:
    """Blocks of ``size`` tokens, of which ``steps`` in turn have 1/steps, 2/steps, ... all of their tokens guessed."""

    size: int
    steps: int

    @property
    def guessed(self) -> list[int]:
        """Tokens that are guessed, by a block's turn."""
        return [-(-(turn + 1) * self.size // self.steps) for turn in range(self.steps)]

    @property
    def share(self) -> float:
        """The share of the tokens that are guessed, where texts are long."""
        return sum(self.guessed) / (self.steps * self.size)

    def depths(self, learned: Tensor, begins: Tensor) -> Tensor:
        """How many places a guess stands behind its anchor, ``[R]``; 0 where none stands. learned: bool ``[R]``,
        positions whose next token is to be learned. begins: ``[D]``, where documents do. A block begins with the first
        token of an answer, or behind another; a guess is only where its own next token is learned as well."""
        index = torch.arange(len(learned))
        before = torch.nn.functional.pad(learned[:-1], (1, 0))
        start = torch.where(learned & ~before, index, 0).cummax(0).values  # of the answer, where one is
        place = torch.where(learned, index - start, 0)
        opened = (learned & (place % self.size == 0)).cumsum(0)  # blocks up to here
        earlier = opened[begins] - learned[begins].long()
        number = opened - 1 - earlier[torch.bucketize(index, begins, right=True) - 1]  # of the block in its document
        right = self.size - torch.tensor(self.guessed)[number % self.steps]
        # The token at a position belongs to the block of the position before.
        depth = (place - 1) % self.size + 1 - right.roll(1)
        return torch.where(learned & (place > 0), depth, 0).clamp(min=0)


class NoisyText:
    """ids, positions: ``[1, N]``, tokens and positions of the text and then of the guesses, block by block. learned:
    ``[m]``, positions of the text whose next token is to be learned. steps: of each depth that there is, which guesses
    stand there, ``[n]`` of the M, and where in the text, ``[n]`` ascending. num_guesses: those that learn."""

    def __init__(self, batch: Batch, schedule: Schedule) -> None:
        """The guesses are the last right token again, which is what Jacobi decoding begins with."""
        alignment = align(batch, 1)
        device, size = batch.input_ids.device, batch.input_ids.numel()
        begins = alignment.documents.table[1, :-1].long().cpu()
        learned = batch.before_learned().flatten().cpu()  # on the host, where lengths are decided
        depths = schedule.depths(learned, begins)
        opened = (depths == 1).nonzero()[:, 0]
        most = torch.nn.functional.pad(depths, (0, schedule.size))[opened[:, None] + torch.arange(schedule.size)]
        most = (most == torch.arange(1, schedule.size + 1)).sum(1)  # guesses of each block; the last is cut short
        self.groups: list[tuple[Tensor, int]] = []  # anchors [A], and S
        for count in most.unique().tolist():
            self.groups.append(((opened[most == count] - 1).to(device), count))
        self.size, self.begins = size, begins.to(device)
        self.learned = learned.nonzero()[:, 0].to(device)
        empty = self.learned[:0]
        self.anchors = torch.cat([empty, *(at.repeat_interleave(count) for at, count in self.groups)])  # [M]
        self.depths = torch.cat([empty, *(self._depths(count).repeat(len(at)) for at, count in self.groups)])  # [M]
        self.steps = [self._step(depth) for depth in range(1, int(most.max()) + 1 if len(most) else 1)]
        self.tokens, here = batch.input_ids.flatten(), batch.position_ids.flatten()
        self.positions = torch.cat([here, here[self.anchors] + self.depths])[None]
        self.ids = torch.cat([self.tokens, self.tokens[self.anchors]])[None]
        self._blocks = [Blocks(at, alignment.documents, count, causal=True) for at, count in self.groups]

    @property
    def num_guesses(self) -> int:
        """M."""
        return len(self.anchors)

    def guess_from_text(self, share: float) -> None:
        """In so many of the blocks, drawn by torch's own generator, guess tokens of the document before instead."""
        first = self.begins[torch.bucketize(self.anchors, self.begins, right=True) - 1]
        chance = torch.rand(self.num_guesses).to(first.device)
        self._replace(share, self.tokens[first + (chance * (self.anchors + 1 - first)).long()])

    def guess_again(self, share: float, said: Callable[[], Tensor]) -> None:
        """In so many of the blocks, drawn likewise, the guesses of the next pass instead: what was ``said`` after the
        present ones, ``[M]``, each a place further on, and first the right token, which is emitted."""
        if share > 0 and self.num_guesses:
            self._replace(share, torch.where(self.depths == 1, self.tokens[self.anchors + 1], said().roll(1)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
        """query: ``[1, Hq, N, d]``; key: ``[1, Hk, N, d]``; value: ``[1, Hk, N, e]`` -> ``[1, N, Hq, e]``. scaling: of
        scores; None: one over the root of d."""
        if scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves the rotated ones in fp32
        bounds = [*self.begins.tolist(), self.size]
        text = slice(self.size)
        outputs = [by_document(bounds, query[:, :, text], key[:, :, text], value[:, :, text])]
        flat = [each[0].transpose(0, 1) for each in (query, key, value)]  # [N, heads, d] each
        context, start = (flat[1][text], flat[2][text]), self.size
        for blocks, (anchors, count) in zip(self._blocks, self.groups, strict=True):
            here = slice(start, start + len(anchors) * count)
            outputs.append(blocks.attend(flat[0][here], context, (flat[1][here], flat[2][here]))[None])
            start = here.stop
        return torch.cat(outputs, dim=1)

    def visible(self) -> Tensor:
        """Bool ``[1, N, N]``: which keys every query sees."""
        text = torch.arange(self.size, device=self.tokens.device)
        anchor = torch.cat([text, self.anchors])
        depth = torch.cat([torch.zeros_like(text), self.depths])
        document = torch.bucketize(anchor, self.begins, right=True)
        before = (depth == 0) & (anchor <= anchor[:, None]) & (document == document[:, None])
        own = (depth > 0) & (anchor == anchor[:, None]) & (depth <= depth[:, None])
        return (before | own)[None]

    def _depths(self, count: int) -> Tensor:
        return torch.arange(1, count + 1, device=self.learned.device)

    def _step(self, depth: int) -> tuple[Tensor, Tensor]:
        which = (self.depths == depth).nonzero()[:, 0]
        places, order = (self.anchors[which] + depth).sort()
        return which[order], places

    def _replace(self, share: float, guesses: Tensor) -> None:
        """In so many of the blocks, by chance."""
        chosen = (torch.rand(self.size) < share).to(self.tokens.device)[self.anchors]
        self.ids = torch.cat([self.tokens, torch.where(chosen, guesses, self.ids[0, self.size :])])[None]
