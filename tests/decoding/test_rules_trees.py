"""Rejection sampling on trees is lossless: the joint distribution of three emitted tokens, by chi-square.

For siblings drawn without and with replacement, and for chosen candidates. The same tests must reject rules that are
wrong in one place. How often a tree is accepted is known exactly, too.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.tree import ROOT, DraftTree
from tests.chance import REJECTED, same_rate
from tests.decoding.markov import Draft, Markov, V

DRAWS = 1000
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
SETTINGS = [
    Sampling(0.5, top_p=0.95),
    Sampling(1.0),
    Sampling(1.0, top_p=0.8),
    Sampling(1.5, top_p=0.9),
    Sampling(1.5, top_k=3),
]
KINDS = {sampling: [kind] for sampling, kind in zip(SETTINGS, ["near", "far", "missing", "near", "far"], strict=True)}
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
    draft = process.grown(shapes[name])
    if name.startswith("chosen"):  # one tree for all draws
        tree = draft(torch.Generator())
        assert tree.q is None
        return lambda g: tree
    return draft


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


def wrong(fault: str):
    """Rejection sampling on trees, plainly, with one line of it gone wrong."""

    def rule(tree: DraftTree, p: Tensor, generator: torch.Generator) -> rules.Verdict:
        path: list[int] = []
        here, residual = ROOT, p[0]
        while True:
            below = tree.children.get(here, [])
            for child in below:
                token = int(tree.tokens[child])
                q = torch.nn.functional.one_hot(tree.tokens[child], V).float() if tree.q is None else tree.q[child]
                if fault == "q of the first sibling" and tree.q is not None:
                    q = tree.q[below[0]]
                threshold = residual[token] / q[token]
                if fault == "accepts the first":
                    threshold = 1.0
                elif fault == "q is forgotten":
                    threshold = residual[token]
                if torch.rand((), generator=generator) < threshold:
                    path.append(child)
                    here = child
                    if fault != "residual goes down":
                        residual = p[0] if fault == "p of the root" else p[here + 1]
                    break
                left = (residual - q).clamp(min=0)
                if fault == "siblings see p":
                    left = residual
                elif fault == "only the token goes":
                    left = residual.clone()
                    left[token] = 0
                total = left.sum() if fault != "not renormalized" else 1.0
                residual = left / total if left.sum() > 0 else residual
            else:
                return rules.Verdict(
                    tuple(path), int(sample(p[here + 1] if fault == "correction from p" else residual, generator))
                )

    return rule


@pytest.mark.parametrize("name", DRAFTS)
def test_the_plain_form_of_the_rule_is_not_rejected(name):
    # The wrong rules below are wrong by their fault alone.
    process = Markov("far", Sampling(1.0))
    texts, _ = process.emit(wrong("none"), drafts(process, name), DRAWS)
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
    texts, _ = process.emit(wrong(fault), drafts(process, name), DRAWS)
    assert min(process.fits(texts)) < REJECTED / 1000


def test_the_same_test_rejects_siblings_that_claim_one_q():
    process = Markov("far", Sampling(1.0))
    grown = drafts(process, "without replacement")

    def claims_replacement(g: torch.Generator) -> DraftTree:
        tree = grown(g)
        above = torch.where(tree.parents == ROOT, 0, 1 + tree.tokens[tree.parents])
        return DraftTree(tree.tokens, tree.parents, process.q[above])

    texts, _ = process.emit(rules.rejection_sampling, claims_replacement, DRAWS)
    assert min(process.fits(texts)) < REJECTED / 1000


def test_drawn_tokens_may_pass_for_chosen_ones():
    # Whatever the tree, chosen candidates emit exactly p; they are only accepted less often than drawn ones.
    process, _, accepted_as_drawn = drawn("near", Sampling(1.0), "without replacement")
    grown = drafts(process, "without replacement")

    def forgets_q(g: torch.Generator) -> DraftTree:
        tree = grown(g)
        return DraftTree(tree.tokens, tree.parents)

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
        first = drafts(process, "chosen")(torch.Generator()).tokens[:3]
        assert same_rate(int((accepted >= 1).sum()), DRAWS, float(process.p[0, first].sum())) > REJECTED


def test_greedy_walks_down_to_the_target_choices():
    #        root
    #      7      5
    #    1   8   8
    #        9   6
    tree = DraftTree(torch.tensor([7, 5, 1, 8, 8, 9, 6]), torch.tensor([-1, -1, 0, 0, 1, 3, 4]))
    best = torch.zeros(8, dtype=torch.int64)  # row i + 1 behind node i
    best[0], best[1], best[2], best[4], best[5], best[6], best[7] = 7, 8, 8, 9, 6, 3, 2
    assert rules.greedy(tree, best) == ((0, 3, 5), 3)
    best[0] = 5
    assert rules.greedy(tree, best) == ((1, 4, 6), 2)
    best[5] = 4
    assert rules.greedy(tree, best) == ((1, 4), 4)
    best[0] = 9
    assert rules.greedy(tree, best) == ((), 9)  # right two levels down, but nothing leads there


def test_the_first_of_equal_siblings_is_taken():
    tree = DraftTree(torch.tensor([4, 4, 2]), torch.tensor([-1, -1, 1]))
    assert rules.greedy(tree, torch.tensor([4, 5, 2, 1])) == ((0,), 5)


def test_certain_targets_find_their_path_among_siblings():
    g = torch.Generator().manual_seed(0)
    tree = DraftTree(torch.tensor([3, 2, 0, 4, 5]), torch.tensor([-1, -1, -1, 1, 1]))
    p = torch.eye(V)[[2, 1, 5, 1, 1, 4]]
    for _ in range(30):
        assert rules.rejection_sampling(tree, p, g) == ((1, 4), 4)
