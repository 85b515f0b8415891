"""The draft vocabulary: the target tokens that the drafter can propose, chosen by how often they are to be drafted.

V = target vocabulary, Vd = draft vocabulary. Tokens outside count as misses wherever acceptance is measured, so
coverage on held-out text bounds what a drafter can reach.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from specdraft.errors import UserError
from specdraft.targets.batch import Batch


def count_supervised(batch: Batch, vocab_size: int) -> Tensor:
    """How often each token id occurs under the loss mask, ``[V]`` int64. Raises UserError for ids beyond V."""
    return count(batch.input_ids[batch.loss_mask], vocab_size)


def count(ids: Tensor, vocab_size: int) -> Tensor:
    """How often each token id occurs, ``[V]`` int64. Raises UserError for ids beyond V."""
    if ids.numel() and int(ids.max()) >= vocab_size:
        raise UserError(
            f"the data holds token id {int(ids.max())}, the target's vocabulary ends at {vocab_size - 1}: "
            "expected the target's own tokenizer"
        )
    return torch.bincount(ids, minlength=vocab_size)


def build_draft_vocabulary(counts: Tensor, size: int | None, always: Iterable[int] = ()) -> Tensor:
    """Sorted target ids ``[Vd]`` int64: ``always`` (end marks and the like), then the most frequent of ``counts``.

    Equal counts prefer the smaller id. ``size`` None takes the whole vocabulary. Raises UserError if ``size`` does not
    lie between the number of ids in ``always`` and V.
    """
    vocab_size = counts.numel()
    special = sorted({token for token in always if 0 <= token < vocab_size})
    if size is None:
        return torch.arange(vocab_size)
    if size > vocab_size:
        raise UserError(
            f"model.draft_vocab_size is {size}, the target's vocabulary has {vocab_size} tokens: "
            "expected at most that, or null for all of it"
        )
    if size < max(1, len(special)):
        raise UserError(
            f"model.draft_vocab_size is {size}: expected at least {max(1, len(special))}, "
            "so that the target's end marks have a place"
        )
    ranked = counts.clone()
    ranked[torch.tensor(special, dtype=torch.int64)] = torch.iinfo(torch.int64).max
    order = torch.sort(ranked, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, vocabulary: Tensor) -> float:
    """The share of counted tokens that the draft vocabulary holds; nan where nothing was counted."""
    total = int(counts.sum())
    return int(counts[vocabulary].sum()) / total if total else float("nan")
