"""The draft vocabulary: the target tokens that the drafter can propose, chosen by how often they are to be drafted.

V = target vocabulary, Vd = draft vocabulary. Tokens outside count as misses wherever acceptance is measured, so
coverage on held-out text bounds what a drafter can reach."""

from collections.abc import Iterable

import torch
from torch import Tensor

from specdraft.errors import UserError


def count(ids: Tensor, vocab_size: int) -> Tensor:
    """How often each token id occurs, ``[V]`` int64. Raises UserError for ids beyond V."""
    if ids.numel() and int(ids.max()) >= vocab_size:
        said = f"the data holds token id {int(ids.max())}, the target's vocabulary ends at {vocab_size - 1}"
        raise UserError(f"{said}: expected the target's own tokenizer")
    return torch.bincount(ids, minlength=vocab_size)


def build_draft_vocabulary(counts: Tensor, size: int | None, always: Iterable[int] = ()) -> Tensor:
    """Sorted target ids ``[Vd]`` int64: ``always`` (end marks), then the most frequent of ``counts``, of equal ones the
    smaller id. ``size`` None takes all. Raises UserError if ``size`` is too small for ``always`` or above V."""
    vocab_size = counts.numel()
    special = list({token for token in always if 0 <= token < vocab_size})
    if size is None:
        return torch.arange(vocab_size)
    if size > vocab_size:
        raise UserError(
            f"model.draft_vocab_size is {size}, the target's vocabulary has {vocab_size} tokens: expected at most that"
        )
    if size < (least := max(1, len(special))):
        raise UserError(f"model.draft_vocab_size is {size}: expected at least {least}, for the target's end marks")
    ranked = counts.clone()
    ranked[torch.tensor(special, dtype=torch.int64)] = torch.iinfo(torch.int64).max
    order = torch.sort(ranked, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, vocabulary: Tensor) -> float:
    """The share of counted tokens that the draft vocabulary holds; nan where nothing was counted."""
    total = int(counts.sum())
    return int(counts[vocabulary].sum()) / total if total else float("nan")
