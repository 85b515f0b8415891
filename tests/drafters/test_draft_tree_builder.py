"""Growing drafts from a table: what follows a path is known, so every token, parent and q of a draft is too."""

from itertools import product

import pytest
import torch
from torch import Tensor

from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.tree import ROOT, DraftTree
from specdraft.drafters.draft_tree_builder import Level, Vocabulary, grow, grow_batch
from tests.chance import REJECTED, goodness_of_fit

V = 5
BUSHY = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)))
SHAPES = [StaticTree.chain(1), StaticTree.chain(4), BUSHY, DynamicTree(1, 3, 9), DynamicTree(4, 3, 11)]

Path = tuple[int, ...]


class Table:
    """A drafter whose logits behind a path of draft ids are drawn once and for all.

    It finds out for itself, from ``parents`` and from ``seen``, which path every node that it reads ends; both must
    tell the same.
    """

    def __init__(self, seed: int = 0, size: int = V, ids: Tensor | None = None, spread: float = 1.5) -> None:
        self.seed, self.size, self.ids, self.spread = seed, size, ids, spread
        self.vocabulary = Vocabulary(V if ids is None else int(ids.max()) + 3, ids)

    def logits(self, path: Path) -> Tensor:
        """``[Vd]`` behind a path of target ids."""
        number = self.seed
        for token in path:
            number = number * 31 + token + 1
        g = torch.Generator().manual_seed(number)
        return self.spread * torch.randn(self.size, generator=g)

    def draft(self, shape, sampling=Sampling(), generator=None) -> DraftTree:  # noqa: B008
        self.read: list[Path] = []  # of every node read, in order
        self.depths: list[int] = []
        self.level: list[Path] = [()]
        return grow(self.logits(())[None], self.expand, shape, sampling, generator, self.vocabulary)

    def expand(self, level: Level) -> Tensor:
        above = [self.level[row] for row in level.parents.tolist()]
        self.level = [(*path, token) for path, token in zip(above, level.tokens.tolist(), strict=True)]
        self.read += self.level
        self.depths.append(level.depth)
        for row, path in enumerate(self.level):
            assert len(path) == level.depth
            if level.seen is None:
                assert len(self.level) == 1
            else:
                assert level.seen.shape == (len(self.level), len(self.read))
                ancestors = [self.read[node] for node in level.seen[row].nonzero()[:, 0].tolist()]
                assert ancestors == [path[:depth] for depth in range(1, len(path) + 1)]
        return torch.stack([self.logits(path) for path in self.level])


def paths_of(tree: DraftTree) -> list[Path]:
    """The tokens from the first level down to every node."""
    paths: list[Path] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parent_list, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return paths


def ranked(logits: Tensor) -> list[int]:
    return logits.sort(descending=True, stable=True).indices.tolist()


def best_static(table: Table, shape: StaticTree) -> list[Path]:
    """Node by node from the shape's ranks."""
    ids = range(table.size) if table.ids is None else table.ids.tolist()
    tokens: dict[Path, Path] = {(): ()}
    for ranks in shape.paths:
        above = tokens[ranks[:-1]]
        tokens[ranks] = (*above, ids[ranked(table.logits(above))[ranks[-1]]])
    return [tokens[ranks] for ranks in shape.paths]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [StaticTree.chain(1), StaticTree.chain(4), BUSHY], ids=str)
def test_greedy_static_drafts_hold_the_best_tokens(shape, seed):
    table = Table(seed)
    tree = table.draft(shape)
    assert paths_of(tree) == best_static(table, shape)
    assert tree.q is None
    assert tree.tokens.dtype == tree.parents.dtype == torch.int64
    # Leaves are not read: of every level only what has children.
    inner = {path[:-1] for path in shape.paths} - {()}
    assert len(table.read) == len(inner)
    assert table.depths == list(range(1, shape.depth))


@pytest.mark.parametrize("shape", [StaticTree.chain(3, sampled=False), StaticTree(BUSHY.paths, sampled=False)], ids=str)
def test_at_a_temperature_an_unsampled_draft_is_the_greedy_one(shape):
    table = Table(3)
    hot, cold = table.draft(shape, Sampling(1.3, top_k=1)), table.draft(shape)
    assert hot.q is None
    assert paths_of(hot) == paths_of(cold)


def without_replacement(p: Tensor, siblings: list[int]) -> list[Tensor]:
    """What every sibling in turn was drawn from."""
    rows, rest = [], p.double()
    for token in siblings:
        rest = rest / rest.sum()
        rows.append(rest.clone())
        rest[token] = 0.0
    return rows


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, top_p=0.9), Sampling(1.5, top_k=3)], ids=str)
@pytest.mark.parametrize("shape", [StaticTree.chain(3), BUSHY], ids=str)
def test_sampled_drafts_know_what_they_were_drawn_from(shape, sampling):
    table = Table(1)
    g = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(30):
        tree = table.draft(shape, sampling, g)
        paths = paths_of(tree)
        seen.add(tuple(paths))
        assert len(set(paths)) == len(paths)  # siblings differ
        for parent, below in tree.children.items():
            above = () if parent == ROOT else paths[parent]
            p = sampling.probabilities(table.logits(above))
            rows = without_replacement(p, [int(tree.tokens[child]) for child in below])
            torch.testing.assert_close(tree.q[below].double(), torch.stack(rows), rtol=1e-5, atol=1e-7)
            assert (tree.q[below, tree.tokens[below]] > 0).all()
    assert len(seen) > 10


def test_siblings_are_distributed_as_successive_draws():
    table, sampling = Table(2), Sampling(1.0)
    p = sampling.probabilities(table.logits(()).double())
    exact = torch.zeros(V, V, V, dtype=torch.float64)
    for a, b, c in product(range(V), repeat=3):
        if len({a, b, c}) == 3:
            exact[a, b, c] = p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
    g = torch.Generator().manual_seed(0)
    drawn = torch.stack([table.draft(StaticTree(((0,), (1,), (2,))), sampling, g).tokens for _ in range(4000)])
    flat = drawn @ torch.tensor([V * V, V, 1])
    assert goodness_of_fit(flat, exact) > REJECTED
    assert goodness_of_fit(drawn.flip(1) @ torch.tensor([V * V, V, 1]), exact) < REJECTED / 1000  # the order matters


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=2), Sampling(0.2, top_p=0.5)], ids=str)
def test_few_tokens_leave_fewer_children(sampling):
    # How many is told by the distribution alone, and a node that is missing has no children.
    g = torch.Generator().manual_seed(0)
    for seed in range(10):
        table = Table(seed)
        tree = table.draft(BUSHY, sampling, g)
        paths = paths_of(tree)
        ranks: dict[Path, Path] = {(): ()}  # the shape's path of every node drafted
        for parent in [ROOT, *range(len(tree))]:
            above = () if parent == ROOT else paths[parent]
            here = ranks[above]
            wanted = sum(path[:-1] == here for path in BUSHY.paths)
            possible = int((sampling.probabilities(table.logits(above)) > 0).sum())
            below = tree.children.get(parent, [])
            assert len(below) == min(wanted, possible)
            ranks |= {paths[child]: (*here, rank) for rank, child in enumerate(below)}


def test_more_ranks_than_tokens_are_no_error():
    wide = StaticTree((*((rank,) for rank in range(V + 3)), (0, 0), (V + 1, 0)))
    for sampling in (Sampling(), Sampling(1.0)):
        tree = Table().draft(wide, sampling, torch.Generator().manual_seed(0))
        assert sorted(tree.tokens[:V].tolist()) == list(range(V))
        assert tree.parent_list == [ROOT] * V + [0]
    assert len(Table().draft(DynamicTree(2, V + 3, 100))) == V + V * V


def eagle2(table: Table, shape: DynamicTree) -> dict[Path, float]:
    """EAGLE-2 (2406.16858, section 4) by plain lists: expand the best of each level, then keep the best of all."""
    ids = range(table.size) if table.ids is None else table.ids.tolist()
    level, joint = [()], {(): 0.0}
    for _ in range(shape.depth):
        below: dict[Path, float] = {}
        for path in level:
            scores = table.logits(path).double().log_softmax(-1)
            for token in ranked(scores)[: shape.top_k]:
                below[(*path, ids[token])] = joint[path] + float(scores[token])
        joint |= below
        level = sorted(below, key=below.get, reverse=True)[: shape.top_k]
    del joint[()]
    return {path: joint[path] for path in sorted(joint, key=joint.get, reverse=True)[: shape.num_nodes]}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "shape",
    [DynamicTree(1, 3, 2), DynamicTree(3, 2, 6), DynamicTree(4, 3, 11), DynamicTree(3, 4, 99), DynamicTree(4, 1, 3)],
    ids=str,
)
def test_dynamic_trees_are_those_of_eagle2(shape, seed):
    table = Table(seed)
    tree = table.draft(shape, Sampling(1.0), torch.Generator())
    assert tree.q is None  # chosen, not sampled
    paths = paths_of(tree)
    assert sorted(paths) == sorted(eagle2(table, shape))
    assert table.depths == list(range(1, shape.depth))
    for parent, below in tree.children.items():  # the likelier sibling is tried first
        above = () if parent == ROOT else paths[parent]
        order = ranked(table.logits(above))
        places = [order.index(paths[child][-1]) for child in below]
        assert places == list(range(len(below)))


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("num_nodes", [1, 3, 5, 7])
def test_dynamic_trees_hold_together_where_everything_ties(top_k, num_nodes):
    # A draft that is certain gives every node of its best path the probability 1, and all others 0.
    for spread in (0.0, 1e4):
        table = Table(seed=4, spread=spread)
        tree = table.draft(DynamicTree(5, top_k, num_nodes))
        assert len(tree) == (min(num_nodes, 5) if top_k == 1 else num_nodes)
        assert all(parent < node for node, parent in enumerate(tree.parent_list))
        assert len(set(paths_of(tree))) == len(tree)
        if spread and num_nodes <= 5:  # the certain path comes before anything else
            assert tree.is_chain
            assert paths_of(tree) == best_static(table, StaticTree.chain(num_nodes))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_draft_ids_become_target_ids(shape, sampling):
    ids = torch.tensor([1, 4, 5, 11])
    table = Table(seed=5, size=len(ids), ids=ids)
    tree = table.draft(shape, sampling, torch.Generator().manual_seed(0))
    assert set(tree.tokens.tolist()) <= set(ids.tolist())
    if isinstance(shape, DynamicTree):
        assert sorted(paths_of(tree)) == sorted(eagle2(table, shape))
    elif sampling.greedy:
        assert paths_of(tree) == best_static(table, shape)
    else:
        assert tree.q.shape == (len(tree), table.vocabulary.size)
        outside = [token for token in range(table.vocabulary.size) if token not in ids.tolist()]
        assert not tree.q[:, outside].any()
        first = sampling.probabilities(table.logits(()))
        torch.testing.assert_close(tree.q[0, ids], first)
        torch.testing.assert_close(tree.q.sum(-1), torch.ones(len(tree)))
        assert (tree.q.gather(1, tree.tokens[:, None]) > 0).all()


def test_a_seed_repeats_its_draft():
    table = Table(6)
    drafts = [paths_of(table.draft(BUSHY, Sampling(1.0), torch.Generator().manual_seed(seed))) for seed in (1, 2, 1)]
    assert drafts[0] == drafts[2]
    assert drafts[0] != drafts[1]


def test_drafts_of_a_batch_are_those_of_each_request():
    """Requests of different shapes end at different levels, and each reads its own logits."""
    shapes, tables = [*SHAPES, StaticTree.chain(2)], [Table(seed) for seed in range(1, len(SHAPES) + 2)]
    alone = [table.draft(shape) for table, shape in zip(tables, shapes, strict=True)]
    for table in tables:
        table.read, table.depths, table.level = [], [], [()]
    first = torch.stack([table.logits(()) for table in tables])

    def expand(levels):
        return [tables[number].expand(level) for number, level in levels.items()]

    together = grow_batch(first, expand, shapes, Sampling(), [None] * len(shapes), Vocabulary(V))
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)


def test_a_level_whose_nodes_were_never_drawn_ends_the_draft():
    """Of one likely token there is no second draw, so nothing is left to follow it."""
    table = Table()
    shape = StaticTree(((0,), (1,), (1, 0), (1, 0, 0)))
    tree = table.draft(shape, Sampling(1.0, top_k=1), torch.Generator().manual_seed(0))
    assert tree.tokens.tolist() == ranked(table.logits(()))[:1] and tree.parent_list == [ROOT]
    assert table.depths == []
