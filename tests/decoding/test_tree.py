"""Draft trees: what is derived from the parents, against the plain walk up from every node."""

import pytest
import torch

from specdraft.decoding.tree import ROOT, DraftTree


def tree_of(parents) -> DraftTree:
    return DraftTree(torch.arange(10, 10 + len(parents)), torch.tensor(parents, dtype=torch.int64))


def random_parents(size: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, node, (), generator=g)) if node else ROOT for node in range(size)]


def path_to(parents, node) -> list[int]:
    """The nodes from the first level down to ``node``, by walking up."""
    path = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


def test_a_small_tree_by_hand():
    tree = tree_of([-1, -1, 0, 0, 1, 3])
    assert len(tree) == 6
    assert tree.parent_list == [-1, -1, 0, 0, 1, 3]
    assert tree.depths == [1, 1, 2, 2, 2, 3]
    assert tree.depth == 3
    assert tree.children == {-1: [0, 1], 0: [2, 3], 1: [4], 3: [5]}
    assert not tree.is_chain
    assert tree.ancestors().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_everything_derived_agrees_with_the_walk_up(seed):
    parents = random_parents(1 + 2 * seed, seed)
    tree = tree_of(parents)
    paths = [path_to(parents, node) for node in range(len(parents))]
    assert tree.depths == [len(path) for path in paths]
    assert tree.depth == max(len(path) for path in paths)
    assert [row.nonzero()[:, 0].tolist() for row in tree.ancestors()] == [sorted(path) for path in paths]
    assert sorted(child for below in tree.children.values() for child in below) == list(range(len(parents)))
    for parent, below in tree.children.items():
        assert below == sorted(below)  # in the order in which they are to be tried
        assert all(parents[child] == parent for child in below)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_chain(size):
    q = torch.rand(size, 5)
    tree = DraftTree.chain(torch.arange(size), q)
    assert tree.is_chain
    assert tree.q is q
    assert tree.parent_list == list(range(-1, size - 1))
    assert tree.depths == list(range(1, size + 1))
    assert torch.equal(tree.ancestors(), torch.ones(size, size).tril().bool())


@pytest.mark.parametrize("parents", [[-1, -1], [-1, 0, 0], [-1, 0, -1], [-1, -1, 0]])
def test_branches_are_no_chain(parents):
    assert not tree_of(parents).is_chain


def test_an_empty_draft_is_a_chain_of_nothing():
    tree = DraftTree.empty()
    assert len(tree) == tree.depth == 0
    assert tree.is_chain
    assert tree.depths == []
    assert tree.children == {}
    assert tree.ancestors().shape == (0, 0)
    assert tree.tokens.dtype == tree.parents.dtype == torch.int64
