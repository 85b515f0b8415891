"""Requests side by side: every token sees its own text and path, padding sees something and is seen by nobody."""

import torch

from specdraft.decoding.padded import Reading, pad_pass
from specdraft.decoding.tree import DraftTree

BUSH = DraftTree(torch.tensor([5, 9, 7]), torch.tensor([-1, -1, 0]))


def seen(row: torch.Tensor) -> list[int]:
    return row.nonzero()[:, 0].tolist()


def test_a_tree_and_a_chain_of_requests_of_different_lengths():
    chain = DraftTree.chain(torch.tensor([1]))
    ids, positions, visible = pad_pass([Reading.tree(3, BUSH, held=2), Reading.tree(4, chain, held=5)])
    assert ids.tolist() == [[3, 5, 9, 7], [4, 1, 0, 0]]
    assert positions.tolist() == [[2, 3, 3, 4], [5, 6, 0, 0]]
    assert visible.shape == (2, 4, 9)
    assert [seen(row) for row in visible[0]] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]
    assert [seen(row) for row in visible[1]] == [[*range(6)], [*range(7)], [0], [0]]


def test_an_empty_draft_is_the_last_token_alone():
    ids, positions, visible = pad_pass([Reading.tree(3, DraftTree.empty(), held=2)])
    assert ids.tolist() == [[3]] and positions.tolist() == [[2]] and seen(visible[0, 0]) == [0, 1, 2]


def test_text_beside_a_level_of_a_draft_that_has_read_others_before():
    text = Reading.text(torch.tensor([7, 8, 9]), held=1)
    level = torch.tensor([[True, False, True, False], [False, True, False, True]])  # two nodes before, two now
    nodes = Reading(torch.tensor([4, 5]), torch.tensor([6, 6]), level, held=7)
    ids, positions, visible = pad_pass([text, nodes])
    assert ids.tolist() == [[7, 8, 9], [4, 5, 0]]
    assert positions.tolist() == [[1, 2, 3], [6, 6, 0]]
    assert [seen(row) for row in visible[0]] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    before = [*range(5)]
    assert [seen(row) for row in visible[1]] == [[*before, 5, 7], [*before, 6, 8], [0]]
