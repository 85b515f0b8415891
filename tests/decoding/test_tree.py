"""Draft trees: what is derived from the parents, against the plain walk up from every node."""

import pytest
import torch

from specdraft.decoding.tree import ROOT, DraftTrees, empty, with_root
from tests.decoding.trees import chain_of, path_to, repeat, tree_of

SIZE = 5  # of the vocabulary


def random_parents(size: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, node, (), generator=g)) if node else ROOT for node in range(size)]


def random_tree(size: int, seed: int, sampled: bool = False) -> DraftTrees:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SIZE, (size,), generator=g).tolist()
    return tree_of(tokens, random_parents(size, seed), torch.rand(size, SIZE, generator=g) if sampled else None)


def test_a_small_tree_by_hand():
    tree = tree_of(range(10, 16), [-1, -1, 0, 0, 1, 3])
    assert tree.num_nodes == 6
    assert (tree.depth, tree.width) == (3, 2)
    assert tree.depths.tolist() == [[1, 1, 2, 2, 2, 3]]
    assert tree.ranks.tolist() == [[0, 1, 0, 1, 0, 0]]
    assert not tree.is_chain
    assert tree.ancestors[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_everything_derived_agrees_with_the_walk_up(seed):
    size = 1 + 2 * seed
    every = [random_parents(size, seed + offset) for offset in range(0, 60, 20)]
    trees = DraftTrees.join([tree_of(range(size), parents) for parents in every])
    for row, parents in enumerate(every):
        paths = [path_to(parents, node) for node in range(size)]
        assert trees.depths[row].tolist() == [len(path) for path in paths]
        assert [seen.nonzero()[:, 0].tolist() for seen in trees.ancestors[row]] == [sorted(path) for path in paths]
        siblings = [sum(parents[other] == parents[node] for other in range(node)) for node in range(size)]
        assert trees.ranks[row].tolist() == siblings
    assert trees.depth == trees.depths.amax() and trees.width == trees.ranks.amax() + 1


@pytest.mark.parametrize("size", [1, 2, 7])
def test_chains(size):
    q = torch.rand(3, size, SIZE)
    trees = DraftTrees.chains(torch.arange(3 * size).view(3, size), q)
    assert trees.is_chain
    assert trees.q is q
    assert (trees.depth, trees.width, trees.num_nodes) == (size, 1, size)
    assert trees.parents.tolist() == [list(range(-1, size - 1))] * 3
    assert trees.depths.tolist() == [list(range(1, size + 1))] * 3
    assert torch.equal(trees.ancestors, torch.ones(3, size, size).tril().bool())
    assert not trees.ranks.any()


@pytest.mark.parametrize("parents", [[-1, -1], [-1, 0, 0], [-1, 0, -1], [-1, -1, 0]])
def test_branches_are_no_chain(parents):
    assert not tree_of(range(len(parents)), parents).is_chain


def test_empty_drafts_are_chains_of_nothing():
    trees = empty(2, torch.device("cpu"))
    assert trees.num_nodes == trees.depth == 0
    assert trees.is_chain
    assert trees.depths.shape == trees.ranks.shape == (2, 0)
    assert trees.ancestors.shape == (2, 0, 0)
    assert trees.beneath(torch.ones(2, 0, dtype=torch.bool)).shape == (2, 0)
    assert trees.tokens.dtype == trees.parents.dtype == torch.int64
    assert DraftTrees.join([trees, trees]).tokens.shape == (4, 0)


@pytest.mark.parametrize("seed", range(8))
def test_beneath_what_is_wrong_or_no_draft_nothing_is_right(seed):
    size = 12
    g = torch.Generator().manual_seed(seed)
    right, alive = torch.rand(2, 1, size, generator=g) < 0.8
    parents = random_parents(size, seed)
    for there in (None, alive[0].tolist()):
        tree = tree_of(range(size), parents, alive=there)
        for node, found in enumerate(tree.beneath(right)[0].tolist()):
            assert found == all(right[0, n] and (there is None or there[n]) for n in path_to(parents, node))


@pytest.mark.parametrize("sampled", [(False, False, False), (True, True, True), (True, False, True)], ids=str)
def test_joined_trees_are_padded_with_what_is_no_draft(sampled):
    trees = [repeat(random_tree(4, 0, sampled[0]), 2), random_tree(9, 1, sampled[1]), random_tree(1, 2, sampled[2])]
    joined = DraftTrees.join(trees)
    assert joined.tokens.shape == (4, 9)
    assert joined.depth == max(tree.depth for tree in trees) and joined.width == max(tree.width for tree in trees)
    assert joined.alive.sum(1).tolist() == [4, 4, 9, 1]
    for row, tree in enumerate((trees[0], trees[0], trees[1], trees[2])):
        size = tree.num_nodes
        assert joined.alive[row, :size].all()
        assert torch.equal(joined.tokens[row, :size], tree.tokens[0])
        assert torch.equal(joined.parents[row, :size], tree.parents[0])
        assert torch.equal(joined.ancestors[row, :size, :size], tree.ancestors[0])
        assert torch.equal(joined.ranks[row, :size], tree.ranks[0])
        assert not joined.ancestors[row, :size, size:].any()
        if any(sampled):  # a token that was chosen is one that was drawn from a point mass
            chosen = torch.nn.functional.one_hot(tree.tokens[0], SIZE)
            assert torch.equal(joined.q[row, :size], chosen if tree.q is None else tree.q[0])
        else:
            assert joined.q is None


def test_trees_of_one_size_are_joined_as_they_are():
    trees = [random_tree(5, 0), random_tree(5, 1)]
    assert DraftTrees.join(trees).alive is None
    assert DraftTrees.join(trees[:1]) is trees[0]
    cut = trees[1].truncate(torch.tensor([1]))
    assert DraftTrees.join([trees[0], cut]).alive.tolist() == [[True] * 5, cut.alive[0].tolist()]


@pytest.mark.parametrize("sizes", [(3, 1), (0, 2), (2, 2), (0, 0)])
def test_joined_chains_are_a_chain(sizes):
    joined = DraftTrees.join([chain_of(range(size)) for size in sizes])
    assert joined.is_chain and joined.depth == max(sizes)
    drafts = joined.beneath(torch.ones_like(joined.tokens, dtype=torch.bool))
    assert drafts.sum(1).tolist() == list(sizes)


def test_what_is_beyond_the_room_is_cut():
    trees = repeat(tree_of(range(10, 16), [-1, -1, 0, 0, 1, 3], torch.rand(6, SIZE)), 5)
    cut = trees.truncate(torch.tensor([0, 1, 2, 3, 9]))
    assert cut.alive.sum(1).tolist() == [0, 2, 5, 6, 6]
    assert (cut.alive == (trees.depths <= torch.tensor([0, 1, 2, 3, 9])[:, None])).all()
    assert cut.tokens is trees.tokens and cut.parents is trees.parents and cut.q is trees.q
    again = cut.truncate(torch.tensor([3, 0, 1, 3, 2]))  # what was no draft does not become one
    assert again.alive.sum(1).tolist() == [0, 0, 2, 6, 5]
    chains = repeat(chain_of([1, 2, 3]), 2).truncate(torch.tensor([1, 2]))
    assert chains.is_chain and chains.alive.sum(1).tolist() == [1, 2]


def test_every_node_sees_the_root():
    seen = with_root(tree_of([1, 2], [-1, -1]).ancestors)
    assert seen.int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
