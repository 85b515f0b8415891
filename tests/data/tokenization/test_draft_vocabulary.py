import pytest
import torch

from specdraft.data.packing import pack
from specdraft.data.tokenization.chat import Example
from specdraft.data.tokenization.draft_vocabulary import build_draft_vocabulary, count, coverage
from specdraft.errors import UserError

COUNTS = torch.tensor([0, 5, 0, 9, 1, 9, 0, 2])


def test_only_supervised_tokens_count() -> None:
    batch, _ = pack([Example([3, 3, 1, 2], [False, False, True, True]), Example([1, 1], [False, True])], 8)
    supervised = batch.input_ids[batch.loss_mask]
    assert count(supervised, 5).tolist() == [0, 2, 1, 0, 0]
    with pytest.raises(UserError, match="token id 2"):
        count(supervised, 2)


def test_the_most_frequent_tokens_are_taken_sorted_by_id() -> None:
    vocabulary = build_draft_vocabulary(COUNTS, 3)
    assert vocabulary.tolist() == [1, 3, 5]
    assert vocabulary.dtype == torch.int64
    assert coverage(COUNTS, vocabulary) == pytest.approx(23 / 26)


def test_end_marks_are_always_in() -> None:
    assert build_draft_vocabulary(COUNTS, 3, always=[6]).tolist() == [3, 5, 6]
    assert build_draft_vocabulary(COUNTS, 1, always=[6]).tolist() == [6]


def test_ties_prefer_the_smaller_id() -> None:
    assert build_draft_vocabulary(torch.zeros(6, dtype=torch.int64), 3).tolist() == [0, 1, 2]
    assert build_draft_vocabulary(COUNTS, 1).tolist() == [3]


@pytest.mark.parametrize("size", [None, 8])
def test_all_of_the_vocabulary(size: int | None) -> None:
    vocabulary = build_draft_vocabulary(COUNTS, size)
    assert vocabulary.tolist() == list(range(8))
    assert coverage(COUNTS, vocabulary) == 1.0


@pytest.mark.parametrize(
    ("size", "message"), [(9, "is 9, the target's vocabulary has 8"), (1, "at least 2"), (0, "at least 2")]
)
def test_impossible_sizes_are_refused(size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_draft_vocabulary(COUNTS, size, always=[0, 7])
