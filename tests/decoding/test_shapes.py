"""Shapes of drafts: which sets of paths are trees, and which tree is best for measured accuracies."""

from itertools import product

import pytest
import torch

from specdraft.decoding.shapes import LONGEST, DynamicTree, StaticTree, as_shape, tree_from_accuracies, tree_from_ranks
from specdraft.errors import UserError

BUSHY = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)))


def test_a_draft_has_a_length_that_can_be_read():
    assert StaticTree.chain(LONGEST).depth == DynamicTree(LONGEST).depth == 512
    with pytest.raises(UserError, match="num_draft_tokens is 5000: expected at most 512 drafted tokens a round"):
        StaticTree.chain(5000)
    with pytest.raises(UserError, match="depth is 513: expected at most 512"):
        DynamicTree(513)


def test_paths_are_sorted_by_level_and_counted_once():
    shuffled = StaticTree(([0, 1], [1], [0, 0], [0], [0, 0], [1, 0]), sampled=False)
    assert shuffled.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert shuffled == StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), sampled=False)
    assert (shuffled.depth, shuffled.num_nodes, shuffled.is_chain) == (2, 5, False)


def test_branching_counts_the_children_of_every_node_in_order():
    assert BUSHY.branching == [[3], [2, 1, 0], [1, 0, 2]]
    assert StaticTree.chain(3).branching == [[1], [1], [1]]


@pytest.mark.parametrize(
    ("paths", "culprit"),
    [
        (((0, 0),), r"\[0, 0\]"),  # no parent
        (((0,), (1, 0)), r"\[1, 0\]"),
        (((0,), (0, 0, 0)), r"\[0, 0, 0\]"),
        (((1,),), r"\[1\]"),  # no better sibling
        (((0,), (2,)), r"\[2\]"),
        (((0,), (0, 1)), r"\[0, 1\]"),
        (((0,), (-1,)), r"\[-1\]"),
        (((0,), ()), r"\[\]"),  # the root is no node
    ],
)
def test_paths_that_are_no_tree_are_refused(paths, culprit):
    with pytest.raises(UserError, match=rf"has a node {culprit} without .*: expected paths"):
        StaticTree(paths)


def test_a_tree_without_nodes_is_refused():
    with pytest.raises(UserError, match="has no nodes: expected at least one path"):
        StaticTree(())


@pytest.mark.parametrize("number", [0, -1, True, 2.0, None])
def test_a_chain_needs_a_whole_number_of_tokens(number):
    with pytest.raises(UserError, match=f"num_draft_tokens is {number}: expected at least 1"):
        as_shape(number)


def test_a_number_is_a_chain_and_a_shape_is_itself():
    assert as_shape(4) == StaticTree.chain(4) == StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))
    assert as_shape(4).is_chain
    assert as_shape(BUSHY) is BUSHY
    dynamic = DynamicTree(3, 2, 5)
    assert as_shape(dynamic) is dynamic


@pytest.mark.parametrize("name", ["depth", "top_k", "num_nodes"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_a_dynamic_tree_needs_whole_numbers(name, value):
    with pytest.raises(UserError, match=f"dynamic tree's {name} is {value}: expected a whole number of at least 1"):
        DynamicTree(**{name: value})


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_cut_keeps_the_first_levels(depth):
    static = StaticTree(BUSHY.paths, sampled=False).truncate(depth)
    assert static.paths == tuple(path for path in BUSHY.paths if len(path) <= depth)
    assert static.depth == min(depth, 3)
    assert not static.sampled
    assert StaticTree.chain(3).truncate(depth) == StaticTree.chain(min(depth, 3))
    assert DynamicTree(3, 2, 5).truncate(depth) == DynamicTree(min(depth, 3), 2, 5)


def test_names_say_what_is_drafted():
    assert str(StaticTree.chain(5)) == "chain of 5"
    assert str(StaticTree.chain(5, sampled=False)) == "chain of 5, most likely tokens"
    assert str(BUSHY) == "static tree of 9"
    assert str(StaticTree(BUSHY.paths, sampled=False)) == "static tree of 9, most likely tokens"
    assert str(DynamicTree(6, 4, 20)) == "dynamic tree of 20, depth 6, top 4"


def expected_acceptance(paths, accuracies) -> float:
    """The sum over nodes of the probability that all above it and itself are right."""
    total = 0.0
    for path in paths:
        joint = 1.0
        for level, rank in enumerate(path):
            joint *= accuracies[level][rank]
        total += joint
    return total


def trees_of(num_nodes: int, accuracies) -> set[frozenset[tuple[int, ...]]]:
    """Every tree of ``num_nodes`` nodes within the measured levels and ranks, grown a node at a time."""
    every = [
        path for depth in range(1, len(accuracies) + 1) for path in product(*map(range, map(len, accuracies[:depth])))
    ]
    trees = {frozenset([()])}
    for _ in range(num_nodes):
        trees = {
            tree | {path}
            for tree in trees
            for path in every
            if path not in tree and path[:-1] in tree and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }
    return {tree - {()} for tree in trees}


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_from_accuracies_is_the_best_of_all(seed):
    g = torch.Generator().manual_seed(seed)
    accuracies = [(torch.rand(ranks, generator=g).sort(descending=True).values / 1.2).tolist() for ranks in (3, 2, 3)]
    for num_nodes in (1, 2, 4, 6):
        ours = tree_from_accuracies(accuracies, num_nodes)
        assert ours.num_nodes == num_nodes
        best = max(expected_acceptance(tree, accuracies) for tree in trees_of(num_nodes, accuracies))
        assert expected_acceptance(ours.paths, accuracies) == pytest.approx(best, abs=1e-12)


def test_a_tree_from_accuracies_by_hand():
    # Joint: [0] 0.6, [0, 0] 0.3, [1] 0.25, [0, 1] 0.18, [1, 0] 0.125, [1, 1] 0.075.
    accuracies = [[0.6, 0.25], [0.5, 0.3]]
    assert tree_from_accuracies(accuracies, 1).paths == ((0,),)
    assert tree_from_accuracies(accuracies, 3).paths == ((0,), (1,), (0, 0))
    assert tree_from_accuracies(accuracies, 4).paths == ((0,), (1,), (0, 0), (0, 1))
    assert tree_from_accuracies(accuracies, 99).num_nodes == 6  # all that was measured


def test_a_sure_draft_makes_a_chain_and_ties_make_a_tree():
    assert tree_from_accuracies([[1.0, 0.0]] * 4, 4) == StaticTree.chain(4)
    assert tree_from_accuracies([[0.0, 0.0]] * 2, 3).paths == ((0,), (1,), (0, 0))


@pytest.mark.parametrize("accuracies", [[], [[1.1]], [[-0.1]], [[float("nan")]], [[0.5], [2.0]]])
def test_accuracies_that_are_no_probabilities_are_refused(accuracies):
    with pytest.raises(UserError, match="accuracies between 0 and 1"):
        tree_from_accuracies(accuracies, 3)


@pytest.mark.parametrize(("accuracies", "num_nodes"), [([[]], 3), ([[0.5]], 0)])
def test_a_tree_from_accuracies_has_a_node(accuracies, num_nodes):
    with pytest.raises(UserError, match="at least one"):
        tree_from_accuracies(accuracies, num_nodes)


def test_a_tree_of_levels_that_are_all_alike():
    tree = tree_from_ranks([0.6, 0.3], depth=3, num_nodes=4)
    assert tree == tree_from_accuracies([[0.6, 0.3]] * 3, 4)
    assert tree.paths == ((0,), (1,), (0, 0), (0, 0, 0))
    assert tree_from_ranks([0.5], depth=2, num_nodes=9) == StaticTree.chain(2)
