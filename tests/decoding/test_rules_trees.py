"""Rejection sampling on trees is lossless: the joint distribution of three emitted tokens, by chi-square.

For siblings drawn without and with replacement, and for chosen candidates. The same tests must reject rules that are
wrong in one place. How often a tree is accepted is known exactly, too.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.tree import ROOT, DraftTrees
from tests.chance import REJECTED, same_rate
from tests.decoding.markov import Draft, Markov, V
from tests.decoding.plain_rules import plain
from tests.decoding.trees import chance, plainly, repeat, shared_out, tree_of, uniform

DRAWS, FEW = 20000, 3000
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
SETTINGS = [
    Sampling(0.5, top_p=0.95),
    Sampling(1.0),
    Sampling(1.0, top_p=0.8),
    Sampling(1.5, top_p=0.9),
    Sampling(1.5, top_k=3),
    Sampling(1.2, top_k=2),  # fewer tokens than children
]
KINDS = {
    sampling: [kind] for sampling, kind in zip(SETTINGS, ["near", "far", "missing", "near", "far", "far"], strict=True)
}
KINDS[Sampling(1.0)] = ["near", "far", "missing"]
DRAFTS = ["chain", "without replacement", "with replacement", "chosen", "chosen dynamically"]


def drafts(process: Markov, name: str) -> Draft:
    if name == "with replacement":
        return process.with_replacement((3, 2))
    shapes = {
        "chain": StaticTree.chain(2),
        "without replacement": StaticTree(PATHS),
        "chosen": StaticTree(PATHS, sampled=False),
        "chosen dynamically": DynamicTree(2, 3, 6),
    }
    return process.grown(shapes[name])


@cache
def drawn(kind: str, sampling: Sampling, name: str) -> tuple[Markov, Tensor, Tensor]:
    """What the rule itself emits and accepts."""
    process = Markov(kind, sampling)
    return process, *process.emit(rules.rejection_sampling, drafts(process, name), DRAWS)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("name", DRAFTS)
def test_trees_emit_what_plain_sampling_would(name, sampling):
    for kind in KINDS[sampling]:
        process, texts, accepted = drawn(kind, sampling, name)
        assert min(process.fits(texts)) > REJECTED, kind
        assert 0 < int(accepted.sum()) < 2 * DRAWS  # both ways were taken


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["chain", "without replacement", "with replacement"])
def test_the_rule_is_its_plain_form_draw_for_draw(name, sampling):
    for kind in KINDS[sampling]:
        process = Markov(kind, sampling)
        trees = drafts(process, name)(chance(FEW))
        p, numbers = process.after(trees), uniform(FEW, trees)
        ours, theirs = (rule(trees, p, numbers) for rule in (rules.rejection_sampling, plain()))
        assert plainly(ours) == plainly(theirs)


def test_fewer_tokens_than_children_are_fewer_children():
    process = Markov("far", Sampling(1.2, top_k=2))
    trees = drafts(process, "without replacement")(chance(FEW))
    assert (trees.alive == torch.tensor([True, True, False, True, True, True])).all()
    numbers = uniform(FEW, trees)
    accepted = [path for path, _ in plainly(rules.rejection_sampling(trees, process.after(trees), numbers))]
    assert not {2} & {node for path in accepted for node in path}


def test_a_tree_that_the_context_cuts_is_still_exact():
    process = Markov("far", Sampling(1.2, top_p=0.95))
    for shape in (StaticTree(PATHS), StaticTree(PATHS, sampled=False), StaticTree.chain(2)):
        grown = process.grown(shape)

        def cut(numbers: Chance, grown: Draft = grown) -> DraftTrees:
            return grown(numbers).truncate(numbers.lengths % 3)

        texts, accepted = process.emit(rules.rejection_sampling, cut, DRAWS)
        rooms = torch.arange(DRAWS) % 3
        for room in range(3):
            assert min(process.fits(texts[rooms == room])) > REJECTED
            assert int(accepted[rooms == room].amax()) == room


def test_trees_that_are_joined_are_verified_as_if_alone():
    process, third = Markov("far", Sampling(1.0)), FEW
    names = ["chain", "without replacement", "with replacement"]
    alone = [drafts(process, name)(chance(third, seed)) for seed, name in enumerate(names)]
    trees = DraftTrees.join(alone)
    numbers = uniform(3 * third, trees)
    joined = plainly(rules.rejection_sampling(trees, process.after(trees), numbers))
    for index, each in enumerate(alone):
        rows = slice(index * third, (index + 1) * third)
        own = uniform(third, each)
        for mine, all_of_them in zip(shared_out(own), shared_out(numbers[rows]), strict=True):
            mine.copy_(all_of_them[:, : each.num_nodes] if mine.ndim == 2 else all_of_them)
        assert plainly(rules.rejection_sampling(each, process.after(each), own)) == joined[rows]


@pytest.mark.parametrize("names", [("chain", "chosen"), ("without replacement", "chosen dynamically"), DRAFTS], ids=str)
def test_trees_that_are_joined_are_exact_each(names):
    process = Markov("far", Sampling(1.0))
    part = DRAWS // len(names)

    def joined(numbers: Chance) -> DraftTrees:
        parts = [
            Chance(*(each[index * part : (index + 1) * part] for each in (numbers.seeds, numbers.lengths)))
            for index in range(len(names))
        ]
        return DraftTrees.join([drafts(process, name)(own) for name, own in zip(names, parts, strict=True)])

    texts, accepted = process.emit(rules.rejection_sampling, joined, part * len(names))
    for index in range(len(names)):
        rows = slice(index * part, (index + 1) * part)
        assert min(process.fits(texts[rows])) > REJECTED
        assert 0 < int(accepted[rows].sum()) < 2 * part


@pytest.mark.parametrize("name", DRAFTS)
def test_the_plain_form_of_the_rule_is_not_rejected(name):
    # The wrong rules below are wrong by their fault alone.
    process = Markov("far", Sampling(1.0))
    texts, _ = process.emit(plain(), drafts(process, name), FEW)
    assert min(process.fits(texts)) > REJECTED


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("accepts the first", "without replacement"),
        ("accepts the first", "chosen"),
        ("q is forgotten", "with replacement"),
        ("q of the first sibling", "without replacement"),
        ("siblings see p", "without replacement"),
        ("siblings see p", "with replacement"),
        ("siblings see p", "chosen"),
        ("only the token goes", "without replacement"),
        ("only the token goes", "with replacement"),
        ("not renormalized", "without replacement"),
        ("not renormalized", "chosen"),
        ("correction from p", "without replacement"),
        ("correction from p", "with replacement"),
        ("correction from p", "chosen"),
        ("residual goes down", "chosen"),
        ("p of the root", "without replacement"),
        ("p of the root", "chosen dynamically"),
    ],
)
def test_the_same_test_rejects_wrong_rules(fault, name):
    process = Markov("far", Sampling(1.0))
    texts, _ = process.emit(plain(fault), drafts(process, name), FEW)
    assert min(process.fits(texts)) < REJECTED / 1000


def test_the_same_test_rejects_siblings_that_claim_one_q():
    process = Markov("far", Sampling(1.0))
    grown = drafts(process, "without replacement")

    def claims_replacement(numbers: Chance) -> DraftTrees:
        trees = grown(numbers)
        above = torch.where(trees.parents == ROOT, 0, 1 + trees.tokens.gather(1, trees.parents.clamp(min=0)))
        return DraftTrees(trees.tokens, trees.parents, process.q[above], None, depth=trees.depth, width=trees.width)

    texts, _ = process.emit(rules.rejection_sampling, claims_replacement, DRAWS)
    assert min(process.fits(texts)) < REJECTED / 1000


def test_drawn_tokens_may_pass_for_chosen_ones():
    # Whatever the tree, chosen candidates emit exactly p; they are only accepted less often than drawn ones.
    process, _, accepted_as_drawn = drawn("near", Sampling(1.0), "without replacement")
    grown = drafts(process, "without replacement")

    def forgets_q(numbers: Chance) -> DraftTrees:
        trees = grown(numbers)
        return DraftTrees(trees.tokens, trees.parents, None, None, depth=trees.depth, width=trees.width)

    texts, accepted = process.emit(rules.rejection_sampling, forgets_q, DRAWS)
    assert min(process.fits(texts)) > REJECTED
    assert accepted.sum() < accepted_as_drawn.sum()


def acceptance(p: Tensor, q: Tensor, count: int, replace: bool) -> float:
    """The probability that one of ``count`` siblings is accepted, summed over everything that can be drawn."""
    total, residual = 0.0, (p - q).clamp(min=0)
    for token in q.nonzero()[:, 0].tolist():
        accepted = min(1.0, float(p[token] / q[token]))
        rejected = 1 - accepted
        if rejected > 0 and count > 1:
            rest = q.clone()
            if not replace:
                rest[token] = 0
            if rest.sum() > 0:
                accepted += rejected * acceptance(residual / residual.sum(), rest / rest.sum(), count - 1, replace)
        total += float(q[token]) * accepted
    return total


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["chain", "without replacement", "with replacement"])
def test_how_often_a_first_token_is_accepted(name, sampling):
    for kind in KINDS[sampling]:
        process, _, accepted = drawn(kind, sampling, name)
        p, q = process.p[0].double(), process.q[0].double()
        one = acceptance(p, q, 1, replace=True)
        assert one == pytest.approx(1 - 0.5 * float((p - q).abs().sum()), abs=1e-6)
        width = 1 if name == "chain" else 3
        exact = acceptance(p, q, width, replace=name == "with replacement")
        assert exact >= one
        hits = int((accepted >= 1).sum())
        assert same_rate(hits, DRAWS, exact) > REJECTED
        assert same_rate(hits, DRAWS, exact - 0.1 if exact > 0.5 else exact + 0.1) < REJECTED


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_chosen_candidates_are_accepted_as_often_as_the_target_wants_them(sampling):
    for kind in KINDS[sampling]:
        process, _, accepted = drawn(kind, sampling, "chosen")
        first = drafts(process, "chosen")(chance(1)).tokens[0, :3]
        assert same_rate(int((accepted >= 1).sum()), DRAWS, float(process.p[0, first].sum())) > REJECTED


def test_greedy_walks_down_to_the_target_choices():
    #        root
    #      7      5
    #    1   8   8
    #        9   6
    tree = tree_of([7, 5, 1, 8, 8, 9, 6], [-1, -1, 0, 0, 1, 3, 4])
    best = torch.zeros(4, 8, dtype=torch.int64)  # row i + 1 behind node i
    best[:, 1:] = torch.tensor([8, 8, 0, 9, 6, 3, 2])
    best[:, 0] = torch.tensor([7, 5, 5, 9])
    best[2, 5] = 4
    expected = [
        ((0, 3, 5), 3),
        ((1, 4, 6), 2),
        ((1, 4), 4),
        ((), 9),
    ]  # of the last, two are right that nothing leads to
    assert plainly(rules.greedy(repeat(tree, 4), best)) == expected
    for row, verdict in enumerate(expected):
        assert plainly(rules.greedy(tree, best[row : row + 1])) == [verdict]


def test_greedy_takes_nothing_that_is_no_draft():
    tree = tree_of([7, 5, 1, 8], [-1, -1, 0, 0], alive=[True, True, True, False])
    best = torch.tensor([[7, 8, 0, 0, 3]])
    assert plainly(rules.greedy(tree, best)) == [((0,), 8)]
    unreachable = tree_of([7, 8], [-1, 0], alive=[False, True])  # with every node above them
    assert plainly(rules.greedy(unreachable, torch.tensor([[7, 8, 3]]))) == [((), 7)]
    for room, expected in enumerate([((), 7), ((0,), 8), ((0, 3), 3)]):
        whole = tree_of([7, 5, 1, 8], [-1, -1, 0, 0])
        assert plainly(rules.greedy(whole.truncate(torch.tensor([room])), best)) == [expected]


def test_the_first_of_equal_siblings_is_taken():
    tree = tree_of([4, 4, 2], [-1, -1, 1])
    assert plainly(rules.greedy(tree, torch.tensor([[4, 5, 2, 1]]))) == [((0,), 5)]
    certain = torch.eye(V)[[4, 5, 2, 1]].expand(30, 4, V)
    verdict = rules.rejection_sampling(repeat(tree, 30), certain, uniform(30, tree))
    assert plainly(verdict) == [((0,), 5)] * 30


def test_certain_targets_find_their_path_among_siblings():
    tree = repeat(tree_of([3, 2, 0, 4, 5], [-1, -1, -1, 1, 1]), 30)
    p = torch.eye(V)[[2, 1, 5, 1, 1, 4]].expand(30, 6, V)
    q = torch.full((30, 5, V), 1 / V)
    for claimed in (None, q):
        trees = DraftTrees(tree.tokens, tree.parents, claimed, depth=2, width=3)
        assert plainly(rules.rejection_sampling(trees, p, uniform(30, trees))) == [((1, 4), 4)] * 30
