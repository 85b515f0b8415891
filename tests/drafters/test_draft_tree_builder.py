"""Growing drafts from a table: what follows a path is known, so every token, parent and q of a draft is too."""

from itertools import product

import pytest
import torch
from torch import Tensor

from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import DynamicTree, ForcedPath, StaticTree
from specdraft.decoding.tree import ROOT
from specdraft.drafters.draft_tree_builder import FIRST_DRAW, Vocabulary, grow
from tests.chance import REJECTED, goodness_of_fit
from tests.drafters.tables import Path, Table, V, chance, children_of, draft_all, nodes_of, paths_of

BUSHY = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)))
SHAPES = [StaticTree.chain(1), StaticTree.chain(4), BUSHY, DynamicTree(1, 3, 9), DynamicTree(4, 3, 11)]


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
    assert (tree.depth, tree.width) == (shape.depth, shape.width)
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
    trees = table.drafts(shape, sampling, chance(30))
    assert (trees.depth, trees.width, trees.num_nodes) == (shape.depth, shape.width, shape.num_nodes)
    assert trees.q.isfinite().all()
    for row in range(30):
        paths = nodes_of(trees, row)
        assert len(set(paths.values())) == len(paths)  # siblings differ
        for parent, below in children_of(trees, row).items():
            p = sampling.probabilities(table.logits(() if parent == ROOT else paths[parent]))
            rows = without_replacement(p, trees.tokens[row, below].tolist())
            torch.testing.assert_close(trees.q[row, below].double(), torch.stack(rows), rtol=1e-5, atol=1e-7)
            assert (trees.q[row, below, trees.tokens[row, below]] > 0).all()
    assert len({tuple(paths_of(trees, row)) for row in range(30)}) > 10


def test_siblings_are_distributed_as_successive_draws():
    table, sampling = Table(2), Sampling(1.0)
    p = sampling.probabilities(table.logits(()).double())
    exact = torch.zeros(V, V, V, dtype=torch.float64)
    for a, b, c in product(range(V), repeat=3):
        if len({a, b, c}) == 3:
            exact[a, b, c] = p[a] * p[b] / (1 - p[a]) * p[c] / (1 - p[a] - p[b])
    drawn = table.drafts(StaticTree(((0,), (1,), (2,))), sampling, chance(20000)).tokens
    flat = drawn @ torch.tensor([V * V, V, 1])
    assert goodness_of_fit(flat, exact) > REJECTED
    assert goodness_of_fit(drawn.flip(1) @ torch.tensor([V * V, V, 1]), exact) < REJECTED / 1000  # the order matters


def test_all_nodes_of_a_tree_are_drawn_independently():
    """Two siblings and a child of each, and the same again for neighboring requests: no draw is used twice."""
    follow = torch.randn(V, V, generator=torch.Generator().manual_seed(1))
    shape, p = StaticTree(((0,), (1,), (0, 0), (1, 0))), follow.double().softmax(-1)
    first = follow[0].expand(60000, -1)
    trees = grow(first, lambda level: follow[level.tokens], shape, Sampling(1.0), chance(60000), Vocabulary(V))
    exact = torch.zeros((V,) * 4, dtype=torch.float64)
    for a, b in product(range(V), repeat=2):
        if a != b:
            exact[a, b] = p[0, a] * p[0, b] / (1 - p[0, a]) * p[a][:, None] * p[b]
    assert trees.parents.tolist()[0] == [ROOT, ROOT, 0, 1]
    assert goodness_of_fit(trees.tokens @ torch.tensor([V**3, V**2, V, 1]), exact) > REJECTED
    pairs = trees.tokens[:-1, 0] * V + trees.tokens[1:, 0]
    assert goodness_of_fit(pairs, p[0][:, None] * p[0]) > REJECTED


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=2), Sampling(0.2, top_p=0.5)], ids=str)
def test_few_tokens_leave_fewer_children(sampling):
    # How many is told by the distribution alone, and a node that is missing has no children.
    fewer = 0
    for seed in range(10):
        table = Table(seed)
        trees = table.drafts(BUSHY, sampling, chance(5))
        assert trees.q.isfinite().all()
        for row in range(5):
            paths, children = nodes_of(trees, row), children_of(trees, row)
            ranks: dict[Path, Path] = {(): ()}  # the shape's path of every node drafted
            for parent in [ROOT, *paths]:
                above = () if parent == ROOT else paths[parent]
                here = ranks[above]
                wanted = sum(path[:-1] == here for path in BUSHY.paths)
                possible = int((sampling.probabilities(table.logits(above)) > 0).sum())
                below = children.get(parent, [])
                assert len(below) == min(wanted, possible)
                fewer += possible < wanted
                ranks |= {paths[child]: (*here, rank) for rank, child in enumerate(below)}
    assert fewer


def test_more_ranks_than_tokens_are_no_error():
    wide = StaticTree((*((rank,) for rank in range(V + 3)), (0, 0), (V + 1, 0)))
    for sampling in (Sampling(), Sampling(1.0)):
        trees = Table().draft(wide, sampling)
        paths = paths_of(trees)
        assert sorted(paths[:V]) == [(token,) for token in range(V)]
        assert len(paths) == V + 1 and paths[V][:1] == paths[0]
    assert len(paths_of(Table().draft(DynamicTree(2, V + 3, 100)))) == V + V * V


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
    tree = table.draft(shape, Sampling(1.0))
    assert tree.q is None  # chosen, not sampled
    paths = nodes_of(tree)
    assert sorted(paths.values()) == sorted(eagle2(table, shape))
    assert table.depths == list(range(1, shape.depth))
    children = children_of(tree)
    assert max(map(len, children.values())) <= tree.width and max(map(len, paths.values())) <= tree.depth
    for parent, below in children.items():  # the likelier sibling is tried first
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
        paths = paths_of(tree)
        assert len(set(paths)) == len(paths) == tree.num_nodes == (min(num_nodes, 5) if top_k == 1 else num_nodes)
        assert all(parent < node for node, parent in enumerate(tree.parents[0].tolist()))
        if spread and num_nodes <= 5:  # the certain path comes before anything else
            assert paths == best_static(table, StaticTree.chain(num_nodes))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_draft_ids_become_target_ids(shape, sampling):
    ids = torch.tensor([1, 4, 5, 11])
    table = Table(seed=5, size=len(ids), ids=ids)
    tree = table.draft(shape, sampling)
    assert set(tree.tokens.flatten().tolist()) <= set(ids.tolist())
    if isinstance(shape, DynamicTree):
        assert sorted(paths_of(tree)) == sorted(eagle2(table, shape))
    elif sampling.greedy:
        assert paths_of(tree) == best_static(table, shape)
    else:
        assert tree.q.shape == (1, tree.num_nodes, table.vocabulary.size)
        outside = [token for token in range(table.vocabulary.size) if token not in ids.tolist()]
        assert not tree.q[..., outside].any()
        first = sampling.probabilities(table.logits(()))
        torch.testing.assert_close(tree.q[0, 0, ids], first)
        torch.testing.assert_close(tree.q.sum(-1), torch.ones(1, tree.num_nodes))
        assert (tree.q.gather(2, tree.tokens[..., None]) > 0).all()


def test_a_seed_repeats_its_draft():
    table = Table(6)
    drafts = [paths_of(table.draft(BUSHY, Sampling(1.0), seed)) for seed in (1, 2, 1)]
    assert drafts[0] == drafts[2]
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2)], ids=str)
def test_drafts_of_a_batch_are_those_of_each_request(sampling, shape):
    """Each reads its own logits, and draws its own tokens."""
    tables = [Table(seed) for seed in range(1, 6)]
    together = draft_all(tables, shape, sampling, chance(5))
    depths = [table.depths for table in tables]
    for row, table in enumerate(tables):
        alone = table.drafts(shape, sampling, chance(5).of(row))
        assert paths_of(together, row) == paths_of(alone) and table.depths == depths[row]
        assert torch.equal(together.parents[row], alone.parents[0])
        if alone.q is not None:
            assert torch.equal(together.q[row], alone.q[0])
    assert len({tuple(paths_of(together, row)) for row in range(5)}) > 1


def test_a_node_without_a_second_draw_takes_all_below_it_along():
    """Of one likely token there is no second draw, so nothing is left to follow it."""
    table = Table()
    shape = StaticTree(((0,), (1,), (1, 0), (1, 0, 0)))
    tree = table.draft(shape, Sampling(1.0, top_k=1))
    assert paths_of(tree) == [(ranked(table.logits(()))[0],)] and tree.q.isfinite().all()


@pytest.mark.parametrize("ids", [None, torch.tensor([1, 4, 5, 11])], ids=["whole", "pruned"])
def test_along_a_forced_path_the_best_of_every_level_are_named(ids):
    size = V if ids is None else len(ids)
    tables = [Table(seed, size, ids) for seed in (3, 4)]
    known = torch.arange(V) if ids is None else ids
    path = known[torch.tensor([[0, 1, 3], [2, 2, 0]])]
    trees = draft_all(tables, ForcedPath(path, 3), Sampling(), chance(2))
    for row, table in enumerate(tables):
        levels = [table.logits(tuple(path[row, :depth].tolist())) for depth in range(3)]
        expected = [[int(known[token]) for token in ranked(logits)[:3]] for logits in levels]
        assert trees.tokens[row].unflatten(0, (3, 3)).tolist() == expected
        assert table.depths == [1, 2]
    assert trees.q is None and trees.alive is None
    wide = draft_all(tables, ForcedPath(path, 99), Sampling(), chance(2))
    assert wide.tokens.shape == (2, 3 * size)


def test_a_forced_level_hangs_on_the_first_node_of_the_level_above():
    trees = draft_all([Table(1), Table(2)], ForcedPath(torch.tensor([[0, 1, 2, 3], [1, 1, 0, 2]]), 3), Sampling(), None)
    assert trees.parents.tolist() == [[ROOT] * 3 + [0] * 3 + [3] * 3 + [6] * 3] * 2
    assert trees.depths.tolist() == [[1] * 3 + [2] * 3 + [3] * 3 + [4] * 3] * 2


def test_no_number_decides_two_draws():
    wide = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 1, 1)))
    asked = []

    class Noted(Chance):
        def uniform(self, first: int, count: int) -> Tensor:
            asked.extend(range(first, first + count))
            return super().uniform(first, count)

    one = chance(1)
    Table().drafts(wide, Sampling(1.0), Noted(one.seeds, one.lengths))
    # Of a node that has children, as many draws as the widest of its level has.
    assert asked == list(range(FIRST_DRAW, FIRST_DRAW + 2 + 2 * 2 + 3 * 2))
