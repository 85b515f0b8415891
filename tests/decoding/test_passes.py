"""Requests side by side: every token sees its own text and path, and nobody sees what another request has."""

import pytest
import torch
from torch import Tensor

from specdraft.decoding.passes import Pass, Riders
from specdraft.decoding.tree import DraftTrees, empty
from tests.decoding.trees import chain_of, tree_of

LIMIT = 100
BUSH = tree_of([5, 9, 7], [-1, -1, 0])


def numbers(*values: int) -> Tensor:
    return torch.tensor(values)


def seen(reading: Pass, request: int) -> list[list[int]]:
    assert reading.visible is not None and reading.visible.shape == (*reading.ids.shape, reading.size)
    return [row.nonzero()[:, 0].tolist() for row in reading.visible[request]]


def test_trees_and_chains_of_requests_of_different_lengths():
    trees = DraftTrees.join([BUSH, chain_of([1])])
    reading = Pass.trees(numbers(3, 4), trees, numbers(2, 5), 5, LIMIT)
    assert reading.ids.tolist() == [[3, 5, 9, 7], [4, 1, 0, 0]]
    assert reading.positions[0].tolist() == [2, 3, 3, 4] and reading.positions[1, :2].tolist() == [5, 6]
    assert reading.places.tolist() == [[2, 3, 4, 5], [5, 6, 7, 8]]
    assert reading.size == 9
    assert seen(reading, 0) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]
    assert seen(reading, 1)[:2] == [[*range(6)], [*range(7)]]
    assert all(seen(reading, 1))  # a token that sees nothing would be NaN


def test_a_tree_alone():
    reading = Pass.trees(numbers(3), BUSH, numbers(2), 2, LIMIT)
    assert reading.positions.tolist() == [[2, 3, 3, 4]]
    assert seen(reading, 0) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]


def test_the_host_may_know_a_loose_bound_on_the_lengths():
    reading = Pass.trees(numbers(3), BUSH, numbers(2), 6, LIMIT)
    assert reading.places.tolist() == [[2, 3, 4, 5]] and reading.size == 10
    assert seen(reading, 0) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]
    text = Pass.text(torch.tensor([[4, 5]]), numbers(2), 6)
    assert seen(text, 0) == [[0, 1, 2], [0, 1, 2, 3]]


def test_chains_side_by_side():
    trees = DraftTrees.chains(torch.tensor([[5, 6], [7, 8]]))
    reading = Pass.trees(numbers(3, 4), trees, numbers(2, 0), 2, LIMIT)
    assert reading.ids.tolist() == [[3, 5, 6], [4, 7, 8]]
    assert reading.positions.tolist() == reading.places.tolist() == [[2, 3, 4], [0, 1, 2]]
    assert seen(reading, 0) == [[*range(end)] for end in (3, 4, 5)]
    assert seen(reading, 1) == [[*range(end)] for end in (1, 2, 3)]


@pytest.mark.parametrize("trees", [chain_of([5, 6]), empty(1, torch.device("cpu"))], ids=["chain", "nothing"])
def test_a_chain_alone_needs_no_mask(trees):
    reading = Pass.trees(numbers(3), trees, numbers(4), 4, LIMIT)
    last = 4 + trees.num_nodes
    assert reading.ids.tolist() == [[3, *trees.tokens[0].tolist()]]
    assert reading.positions.tolist() == reading.places.tolist() == [[*range(4, last + 1)]]
    assert reading.visible is None
    assert (reading.held, reading.size) == (4, last + 1)


def test_no_position_lies_behind_the_limit():
    trees = DraftTrees.join([BUSH, BUSH]).truncate(numbers(2, 0))
    reading = Pass.trees(numbers(3, 4), trees, numbers(2, 5), 5, limit=6)
    assert reading.positions.tolist() == [[2, 3, 3, 4], [5, 5, 5, 5]]
    assert reading.places.tolist() == [[2, 3, 4, 5], [5, 6, 7, 8]]  # each in a place of its own all the same
    within = Pass.trees(numbers(3, 4), trees, numbers(2, 5), 5, limit=8)
    assert within.positions.tolist() == [[2, 3, 3, 4], [5, 6, 6, 7]]


def riders_of(tokens: list[int], offsets: list[int], sees: list[list[int]], rows: int = 1) -> Riders:
    seen = torch.tensor([[column in row for column in range(len(tokens))] for row in sees])
    parts = (torch.tensor(tokens), torch.tensor(offsets), seen)
    return Riders(*(part.expand(rows, *part.shape) for part in parts), asked=1)


RIDERS = riders_of([8, 6, 4], [2, 1, 1], [[0, 2], [1], [1, 2]])


def test_riders_stand_behind_the_drafts_and_see_the_text_and_one_another():
    reading = Pass.trees(numbers(3), BUSH, numbers(2), 2, LIMIT, RIDERS)
    assert reading.ids.tolist() == [[3, 5, 9, 7, 8, 6, 4]]
    assert reading.positions.tolist() == [[2, 3, 3, 4, 4, 3, 3]]
    assert reading.places.tolist() == [[2, 3, 4, 5, 6, 7, 8]] and reading.size == 9
    drafts = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]
    assert seen(reading, 0) == [*drafts, [0, 1, 2, 6, 8], [0, 1, 2, 7], [0, 1, 2, 7, 8]]
    bare = Pass.trees(numbers(3), empty(1, torch.device("cpu")), numbers(2), 2, LIMIT, RIDERS)
    assert bare.ids.tolist() == [[3, 8, 6, 4]]
    assert seen(bare, 0) == [[0, 1, 2], [0, 1, 2, 3, 5], [0, 1, 2, 4], [0, 1, 2, 4, 5]]


def test_riders_of_requests_of_different_lengths_with_chains():
    trees, riders = DraftTrees.chains(torch.tensor([[5], [7]])), riders_of([8, 6], [1, 3], [[0], [0, 1]], 2)
    reading = Pass.trees(numbers(3, 4), trees, numbers(2, 0), 2, limit=5, riders=riders)
    assert reading.ids.tolist() == [[3, 5, 8, 6], [4, 7, 8, 6]]
    assert reading.positions.tolist() == [[2, 3, 3, 4], [0, 1, 1, 3]]  # behind the context there is nothing
    assert reading.places.tolist() == [[2, 3, 4, 5], [0, 1, 2, 3]] and reading.size == 6
    assert seen(reading, 0) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5]]
    assert seen(reading, 1) == [[0], [0, 1], [0, 2], [0, 2, 3]]


def test_a_prompt():
    reading = Pass.prompt([7, 8, 9], torch.device("cpu"))
    assert reading.ids.tolist() == [[7, 8, 9]] and reading.ids.dtype == torch.int64
    assert reading.positions.tolist() == reading.places.tolist() == [[0, 1, 2]]
    assert reading.visible is None
    assert (reading.held, reading.size) == (0, 3)


def test_texts_that_read_on():
    reading = Pass.text(torch.tensor([[7, 8, 9], [1, 0, 0]]), numbers(1, 4), 4)
    assert reading.positions.tolist() == reading.places.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert seen(reading, 0) == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert seen(reading, 1)[0] == [0, 1, 2, 3, 4] and reading.size == 7


def test_a_level_sees_the_text_and_of_the_drafted_ones_its_own_path():
    drafted = torch.tensor([[True, False, True, False], [False, True, False, True]])  # two nodes before, two now
    reading = Pass.level(
        torch.tensor([[4, 5], [6, 7]]), torch.tensor([[6, 6], [3, 3]]), numbers(5, 2), 5, drafted.expand(2, 2, 4), 2
    )
    assert reading.places.tolist() == [[7, 8], [4, 5]]
    assert reading.positions.tolist() == [[6, 6], [3, 3]]
    assert (reading.held, reading.size) == (7, 9)
    assert seen(reading, 0) == [[*range(5), 5, 7], [*range(5), 6, 8]]
    assert seen(reading, 1) == [[0, 1, 2, 4], [0, 1, 3, 5]]


def test_a_level_of_a_chain_sees_all_that_was_drafted():
    ids, positions = torch.tensor([[4], [6]]), torch.tensor([[8], [4]])
    reading = Pass.level(ids, positions, numbers(5, 1), 5, None, before=2)
    assert reading.places.tolist() == [[7], [3]]
    assert seen(reading, 0) == [[*range(8)]] and seen(reading, 1) == [[*range(4)]]
    alone = Pass.level(ids[:1], positions[:1], numbers(5), 5, None, before=2)
    assert alone.visible is None and (alone.held, alone.size) == (7, 8)
    assert alone.places.tolist() == [[7]] and alone.positions.tolist() == [[8]]


def test_no_pass_reads_a_number_from_the_device():
    """On the meta device there are none."""
    trees = DraftTrees(*(part.to("meta") for part in (BUSH.tokens, BUSH.parents)), depth=BUSH.depth, width=BUSH.width)
    one, ids = torch.zeros(1, dtype=torch.int64, device="meta"), torch.zeros(1, 3, dtype=torch.int64, device="meta")
    read = torch.ones(1, 3, 5, dtype=torch.bool, device="meta")
    riders = Riders(*(part.to("meta") for part in RIDERS[:3]), asked=1)
    for reading in (
        Pass.trees(one, trees, one, 7, LIMIT),
        Pass.trees(one, trees.truncate(one), one, 7, 8),
        Pass.trees(one, trees, one, 7, LIMIT, riders),
        Pass.text(ids, one, 7),
        Pass.level(ids, ids, one, 7, read, 2),
    ):
        assert reading.visible.shape == (1, reading.ids.shape[1], reading.size)
