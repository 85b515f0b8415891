"""Requests read side by side in one pass of a causal LM: padded ids, positions, and which keys each token sees.

B = requests, m = tokens that a request reads, n = the most that one reads, S = keys of the longest request + n."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdraft.decoding.tree import DraftTree


class Reading(NamedTuple):
    """What a request reads after the ``held`` tokens of its cache: tokens and positions ``[m]``. seen: bool ``[m, D]``,
    which of the last D keys, its own tokens' at the end, each token sees, with all before them; None where each token
    follows the one before."""

    tokens: Tensor
    positions: Tensor
    seen: Tensor | None
    held: int

    @classmethod
    def text(cls, tokens: Tensor, held: int) -> "Reading":
        """Tokens that follow one another."""
        return cls(tokens, torch.arange(held, held + len(tokens), device=tokens.device), None, held)

    @classmethod
    def tree(cls, last: int, tree: DraftTree, held: int) -> "Reading":
        """The ``last`` emitted token, and the nodes of the draft after it."""
        tokens = torch.cat([torch.tensor([last], device=tree.tokens.device), tree.tokens])  # [N + 1]
        positions = held + torch.tensor([0, *tree.depths])
        seen = torch.nn.functional.pad(tree.ancestors(), (1, 0, 1, 0))  # [N + 1, N + 1]
        seen[:, 0] = True
        return cls(tokens, positions, seen, held)


def pad_pass(readings: Sequence[Reading]) -> tuple[Tensor, Tensor, Tensor]:
    """All of them in one pass: ids and positions ``[B, n]``, and bool ``[B, n, S]`` which keys each token sees. Padding
    comes last and sees the first key: a token that sees none would be NaN."""
    ids = pad_sequence([reading.tokens for reading in readings], batch_first=True)
    positions = pad_sequence([reading.positions for reading in readings], batch_first=True)
    keys = max(reading.held for reading in readings) + ids.shape[1]
    visible = torch.zeros((*ids.shape, keys), dtype=torch.bool, device=positions.device)
    visible[..., 0] = True
    for request, (tokens, _, seen, held) in zip(visible, readings, strict=True):
        size, end = len(tokens), held + len(tokens)
        if seen is None:
            seen = visible.new_ones((size, size)).tril()
        before = end - seen.shape[1]
        request[:size, :before] = True
        request[:size, before:end] = seen
    return ids, positions.to(ids.device), visible.to(ids.device)
