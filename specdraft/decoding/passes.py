"""What requests read side by side in one pass of a causal LM: ids, positions, places in the cache, and what each sees.

B = requests, n = tokens that each reads, S = keys of the longest request, those that it reads included, D = tokens
drafted before and now, N = nodes of a tree, m = tokens that ride along.

All of it is made on the device from the lengths of the requests; the host knows a bound on the longest."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdraft.decoding.tree import DraftTrees, with_root


class Texts(NamedTuple):
    """The requests ``first``, ``first + 1``, ... of a batch. lengths: ``[B]``, tokens of each so far, the last emitted
    one included, which nobody has read yet. longest: the host's bound on them."""

    lengths: Tensor
    longest: int
    first: int = 0


class Riders(NamedTuple):
    """Tokens that ride along in a pass of the target: it reads them beside the drafts, but never accepts one. They see
    the text, its last token included, and of one another what they say. No draft sees them, and their keys lie behind
    those of the drafts, where the next pass writes over them.

    tokens: ``[B, m]``. offsets: ``[B, m]``, how many positions behind the last emitted token each stands. seen: bool
    ``[B, m, m]``, which riders each of them sees, itself among them. asked: how many of them, the first ones, the
    target's logits are asked for."""

    tokens: Tensor
    offsets: Tensor
    seen: Tensor
    asked: int

    def beside(self, seen: Tensor) -> Tensor:
        """What all that is read sees of one another, the last emitted token and the nodes first: bool
        ``[B, 1 + N + m, 1 + N + m]``, from ``seen [B, 1 + N, 1 + N]`` of those."""
        nodes, riders = seen.shape[1], self.tokens.shape[1]
        both = pad(seen, (0, riders, 0, riders))
        both[:, nodes:, 0] = True
        both[:, nodes:, nodes:] = self.seen
        return both


class Pass(NamedTuple):
    """ids, positions: ``[B, n]``. places: ``[B, n]``, where each token's key goes in its request's part of the cache.
    visible: bool ``[B, n, S]``, which keys each token sees; None where a single request reads one token after the
    other. held: of that one, the tokens before. size: S."""

    ids: Tensor
    positions: Tensor
    places: Tensor
    visible: Tensor | None
    held: int
    size: int

    @classmethod
    def text(cls, ids: Tensor, lengths: Tensor, longest: int, simple: bool = False) -> "Pass":
        """Tokens ``[B, n]`` that follow ``lengths [B]`` others, one after the other. A request that reads fewer is
        padded at its end, where the next pass writes again. ``simple``: of a single request that reads no fewer."""
        places = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        size = longest + ids.shape[1]
        visible = None
        if not simple:
            visible = torch.arange(size, device=ids.device) <= places[..., None]
        return cls(ids, places, places, visible, longest, size)

    @classmethod
    def prompt(cls, tokens: Sequence[int], device: torch.device) -> "Pass":
        """A single text from its beginning."""
        ids = torch.tensor([tokens], dtype=torch.int64, device=device)
        return cls.text(ids, torch.zeros(1, dtype=torch.int64, device=device), 0, simple=True)

    @classmethod
    def trees(
        cls, last: Tensor, trees: DraftTrees, lengths: Tensor, longest: int, limit: int, riders: Riders | None = None
    ) -> "Pass":
        """The ``last [B]`` emitted tokens, the nodes of the drafts after them, and behind those the ``riders``.
        ``limit``: positions that there are, beyond which only nodes stand that are not alive, and riders."""
        ids = torch.cat([last[:, None], trees.tokens], dim=1)  # [B, N + 1]
        if riders is None and trees.is_chain:
            reading = cls.text(ids, lengths, longest, simple=len(ids) == 1)
        else:
            offsets, seen = pad(trees.depths, (1, 0)), with_root(trees.ancestors)
            if riders is not None:
                ids, offsets = torch.cat([ids, riders.tokens], dim=1), torch.cat([offsets, riders.offsets], dim=1)
                seen = riders.beside(seen)
            reading = cls.level(ids, lengths[:, None] + offsets, lengths, longest, seen)
        if riders is None and longest + trees.depth < limit:
            return reading
        return reading._replace(positions=reading.positions.clamp(max=limit - 1))

    @classmethod
    def level(
        cls, ids: Tensor, positions: Tensor, lengths: Tensor, longest: int, seen: Tensor | None, before: int = 0
    ) -> "Pass":
        """Tokens ``[B, n]`` after ``lengths [B]`` of text and ``before`` drafted ones, which see all of the text and of
        the D = before + n drafted ones those that ``seen [B, n, D]`` (bool) marks; None: all of them."""
        places = lengths[:, None] + torch.arange(before, before + ids.shape[1], device=ids.device)
        size = longest + before + ids.shape[1]
        if seen is None:
            simple = len(ids) == 1 and ids.shape[1] == 1
            visible = None if simple else torch.arange(size, device=ids.device) <= places[..., None]
            return cls(ids, positions, places, visible, longest + before, size)
        drafted = torch.arange(size, device=ids.device) - lengths[:, None]  # [B, S]
        known = drafted.clamp(0, seen.shape[-1] - 1)[:, None].expand(-1, ids.shape[1], -1)
        visible = (drafted < 0)[:, None] | (seen.gather(2, known) & (drafted < seen.shape[-1])[:, None])
        return cls(ids, positions, places, visible, longest + before, size)
