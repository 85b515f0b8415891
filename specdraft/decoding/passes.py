"""What requests read side by side in one pass of a causal LM: ids, positions, places in the cache, and what each sees.

B = requests, n = tokens that each reads, S = keys of the longest request, those that it reads included, D = tokens
drafted before and now, N = nodes of a tree.

All of it is made on the device from the lengths of the requests; the host knows a bound on the longest."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.decoding.tree import DraftTrees, with_root


class Texts(NamedTuple):
    """The requests ``first``, ``first + 1``, ... of a batch. lengths: ``[B]``, tokens of each so far, the last emitted
    one included, which nobody has read yet. longest: the host's bound on them."""

    lengths: Tensor
    longest: int
    first: int = 0


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
    def trees(cls, last: Tensor, trees: DraftTrees, lengths: Tensor, longest: int, limit: int) -> "Pass":
        """The ``last [B]`` emitted tokens and the nodes of the drafts after them. ``limit``: positions that there are,
        beyond which only nodes stand that are not alive."""
        ids = torch.cat([last[:, None], trees.tokens], dim=1)  # [B, N + 1]
        if trees.is_chain:
            reading = cls.text(ids, lengths, longest, simple=len(ids) == 1)
        else:
            positions = lengths[:, None] + torch.nn.functional.pad(trees.depths, (1, 0))
            reading = cls.level(ids, positions, lengths, longest, with_root(trees.ancestors))
        if longest + trees.depth < limit:
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
