"""Batches as the checks pack them, and what a step is seen to compare."""

import torch

from specdraft.check.training import compared, packed, text
from specdraft.drafters.alignment import align
from tests.check.mine import subject


def test_documents_are_packed_and_padded():
    batch = packed([[[1, 2, 3], [4, 5]], [[6]]], [[[False, True, True], [True, True]], [[True]]])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, -1, -1, -1, -1]]
    assert batch.loss_mask.tolist() == [[False, True, True, True, True], [True, False, False, False, False]]


def test_all_that_a_step_compares_is_seen():
    mine = subject()
    batch = packed([[text(12, 32, 0)]], [[[True] * 12]])
    rows = compared(mine.drafter(), batch, mine.target)
    supervised = align(batch, 3).supervised
    assert rows.keys() == {(step, int(r) + 1 + step) for step, at in enumerate(supervised) for r in at}
    assert all(torch.isclose(row.sum(), torch.ones((), dtype=row.dtype)) for row in rows.values())
