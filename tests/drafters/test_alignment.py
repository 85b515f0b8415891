"""The one statement of which row predicts what, on examples small enough to check by hand."""

import torch

from specdraft.drafters.alignment import align
from specdraft.targets.batch import Batch


def batch(documents, mask, width):
    """One row per list of documents; a document is its length; padding fills the row."""
    rows = []
    for lengths in documents:
        ids = [d for d, n in enumerate(lengths) for _ in range(n)]
        positions = [p for n in lengths for p in range(n)]
        rest = width - len(ids)
        rows.append((positions + list(range(rest)), ids + [-1] * rest))
    tokens = torch.arange(len(rows) * width).view(len(rows), width)
    return Batch(
        tokens, torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows]), torch.tensor(mask).bool()
    )


def test_rows_start_behind_an_emitted_token_and_end_with_the_answer():
    # prompt 0 1 2 | answer 3 4 5 6
    aligned = align(batch([[7]], [[0, 0, 0, 1, 1, 1, 1]], 7), 4)
    # Row 2 (the last prompt token) is the first: token 3 was emitted by the target, the head drafts 4.
    assert [each.tolist() for each in aligned.supervised] == [[2, 3, 4], [2, 3], [2], []]


def test_the_prompt_is_never_supervised():
    aligned = align(batch([[6]], [[0, 0, 0, 0, 0, 1]], 6), 2)
    assert [each.tolist() for each in aligned.supervised] == [[], []]


def test_no_step_crosses_a_document_border_or_a_row_of_the_batch():
    mask = [[1] * 8, [1] * 8]
    aligned = align(batch([[4, 4], [3, 3]], mask, 8), 3)
    assert aligned.documents.table[1].tolist() == [0, 4, 8, 11, 14, 16]
    assert [each.tolist() for each in aligned.supervised] == [[0, 1, 4, 5, 8, 11], [0, 4], []]


def test_a_second_turn_is_not_reached_through_the_prompt_between():
    aligned = align(batch([[8]], [[0, 1, 1, 1, 0, 1, 1, 1]], 8), 3)
    assert [each.tolist() for each in aligned.supervised] == [[0, 1, 4, 5], [0, 4], []]


def test_supervised_padding_is_ignored():
    aligned = align(batch([[3]], [[1, 1, 1, 1, 1, 1]], 6), 1)
    assert [each.tolist() for each in aligned.supervised] == [[0]]
