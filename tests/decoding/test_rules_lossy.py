"""Lossy rules: their formulas by hand, what they leave exact, and that they do trade the distribution for acceptance.

The distribution of the first emitted token is compared with the target's: the total variation that is measured must be
the one that the formulas give, and lie far outside what sampling noise alone would show.
"""

import math

import pytest
import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.tree import ROOT, DraftTrees, empty
from specdraft.errors import UserError
from tests.chance import REJECTED, goodness_of_fit, same_rate
from tests.decoding.markov import Markov, V
from tests.decoding.trees import chain_of, plainly, repeat, tree_of, uniform

DRAWS = 20000
CHAIN = StaticTree.chain(2)
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)))
SHAPES = [CHAIN, TREE]


def ears_chain(process: Markov, tolerance: float) -> Tensor:
    """The first token's distribution of EARS on a sampled chain, token by token in Python."""
    p, q = process.p[0].tolist(), process.q[0].tolist()
    widened = tolerance * (1 - max(p))
    emitted = [q[x] * min(1.0, p[x] / q[x] + widened) if q[x] else 0.0 for x in range(V)]
    left = [max(p[x] - q[x], 0.0) for x in range(V)]
    rejected = 1 - sum(emitted)
    return torch.tensor([emitted[x] + rejected * left[x] / sum(left) for x in range(V)], dtype=torch.float64)


def typical_chain(process: Markov, rule: rules.Typical) -> Tensor:
    """The same of typical acceptance: p where the draft is rejected."""
    p, q = process.p[0].tolist(), process.q[0].tolist()
    entropy = -sum(x * math.log(x) for x in p if x)
    threshold = min(rule.epsilon, rule.delta * math.exp(-entropy))
    emitted = [q[x] if p[x] > threshold else 0.0 for x in range(V)]
    rejected = 1 - sum(emitted)
    return torch.tensor([emitted[x] + rejected * p[x] for x in range(V)], dtype=torch.float64)


def total_variation(a: Tensor, b: Tensor) -> float:
    return 0.5 * float((a.double() - b.double()).abs().sum())


def frequencies(texts: Tensor) -> Tensor:
    return torch.bincount(texts[:, 0], minlength=V) / len(texts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_tolerance_ears_is_rejection_sampling_draw_for_draw(shape):
    process = Markov("far", Sampling(1.2, top_p=0.95))
    draft = process.grown(shape)
    strict = process.emit(rules.rejection_sampling, draft, 3000)
    ours = process.emit(rules.Ears(0.0), draft, 3000)
    assert torch.equal(strict[0], ours[0])
    assert torch.equal(strict[1], ours[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_tolerance_ears_is_exact_for_chosen_candidates(shape):
    process = Markov("far", Sampling(1.2, top_p=0.95))
    texts, _ = process.emit(rules.Ears(0.0), process.grown(StaticTree(shape.paths, sampled=False)), DRAWS)
    assert min(process.fits(texts)) > REJECTED


def fits_rate(rule: rules.Rule, tree: DraftTrees, p: list[list[float]], expected: float, node: int = 0) -> bool:
    """Whether ``node`` is accepted as often as ``expected``, by counting."""
    verdict = rule(repeat(tree, DRAWS), torch.tensor(p).expand(DRAWS, -1, -1), uniform(DRAWS, tree))
    found = sum(node in path for path, _ in plainly(verdict))
    return same_rate(found, DRAWS, expected) > REJECTED > same_rate(found, DRAWS, abs(expected - 0.04))


@pytest.mark.parametrize("tolerance", [0.1, 0.5, 3.0])
@pytest.mark.parametrize(
    ("p", "q", "token"),
    [
        ([0.5, 0.3, 0.2, 0, 0, 0], [0.1, 0.8, 0.1, 0, 0, 0], 1),  # 3/8 + tolerance / 2
        ([0.9, 0.1, 0.0, 0, 0, 0], [0.1, 0.8, 0.1, 0, 0, 0], 2),  # 0 + tolerance / 10
        ([0.2] * 5 + [0.0], [0.0, 0.4, 0.3, 0.3, 0, 0], 1),  # 1/2 + 4/5 tolerance
        ([1.0, 0, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0, 0], 1),  # a sure target forgives nothing
    ],
)
def test_ears_widens_acceptance_where_the_target_is_unsure(tolerance, p, q, token):
    # u - tolerance * (1 - max p) <= p / q.
    rows = [p, [1 / V] * V]
    widened = tolerance * (1 - max(p))
    drawn, chosen = chain_of([token], torch.tensor([q])), chain_of([token])
    assert fits_rate(rules.Ears(tolerance), drawn, rows, min(1.0, p[token] / q[token] + widened))
    assert fits_rate(rules.Ears(tolerance), chosen, rows, min(1.0, p[token] + widened))


def test_ears_widens_acceptance_of_siblings_too():
    # The first sibling has no chance; then the residual is p, and the second is accepted with p + tolerance * 0.5.
    p = [[0.5, 0.3, 0.2, 0.0, 0, 0], [1 / V] * V, [1 / V] * V]
    assert fits_rate(rules.Ears(0.2), tree_of([3, 2], [ROOT, ROOT]), p, (1 - 0.1) * (0.2 + 0.1), node=1)


def test_ears_widens_acceptance_of_sampled_siblings_too():
    # Where p is 0 a draft has the allowance alone, 1.0 * (1 - 0.5), however it was drawn.
    p = [[0.5, 0.3, 0.2, 0.0, 0, 0], [1 / V] * V, [1 / V] * V]
    q = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0, 0], [0.6, 0.0, 0.0, 0.0, 0.4, 0]])
    tree = tree_of([3, 4], [ROOT, ROOT], q)
    assert fits_rate(rules.Ears(1.0), tree, p, 0.5)
    assert fits_rate(rules.Ears(1.0), tree, p, 0.25, node=1)


@pytest.mark.parametrize("kind", ["near", "far", "missing"])
@pytest.mark.parametrize("rule", [rules.Ears(0.4), rules.Typical()], ids=str)
def test_lossy_rules_emit_what_their_formulas_say(kind, rule):
    process = Markov(kind, Sampling(1.2))
    expected = ears_chain(process, 0.4) if isinstance(rule, rules.Ears) else typical_chain(process, rule)
    texts, _ = process.emit(rule, process.grown(CHAIN), DRAWS)
    assert expected.sum() == pytest.approx(1)
    assert goodness_of_fit(texts[:, 0], expected) > REJECTED


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", [rules.Ears(0.4), rules.Typical()], ids=str)
def test_lossy_rules_accept_more_and_change_the_distribution(rule, shape):
    process = Markov("far", Sampling(1.2))
    exact = process.exact.sum((1, 2))
    draft = process.grown(shape)
    strict, strictly = process.emit(rules.rejection_sampling, draft, DRAWS)
    loose, loosely = process.emit(rule, draft, DRAWS)
    noise = math.sqrt(V / DRAWS)  # about three times what V frequencies show by chance
    assert total_variation(frequencies(strict), exact) < noise < total_variation(frequencies(loose), exact)
    assert goodness_of_fit(strict[:, 0], exact) > REJECTED
    assert goodness_of_fit(loose[:, 0], exact) < REJECTED / 1000
    assert loosely.double().mean() > strictly.double().mean() + 0.1


def row_of(*head: float) -> list[float]:
    return [*head, *[0.0] * (V - len(head))]


@pytest.mark.parametrize(
    ("p", "accepted"),
    [
        # exp(-H) = 1: what counts is epsilon.
        (row_of(1.0), {0}),
        # Uniform over 4: exp(-H) = 1/4, threshold min(0.09, 0.075), all four above it.
        (row_of(0.25, 0.25, 0.25, 0.25), {0, 1, 2, 3}),
        # H = 0.325, exp(-H) = 0.72, 0.3 * 0.72 = 0.22: epsilon.
        (row_of(0.9, 0.1), {0, 1}),
        (row_of(0.92, 0.08), {0}),
        # H = 1.609, exp(-H) = 0.2, 0.3 * 0.2 = 0.06: below epsilon.
        (row_of(0.24, 0.24, 0.24, 0.22, 0.055, 0.005), {0, 1, 2, 3}),
        (row_of(0.22, 0.22, 0.22, 0.20, 0.07, 0.07), {0, 1, 2, 3, 4, 5}),
    ],
)
def test_typical_acceptance_by_hand(p, accepted):
    rows = torch.tensor([p, row_of(0, 0, 0, 0, 0, 1.0)]).expand(V, 2, V)
    every = DraftTrees.chains(torch.arange(V)[:, None])
    for token, (path, follows) in enumerate(plainly(rules.Typical()(every, rows, uniform(V, every)))):
        assert path == ((0,) if token in accepted else ())
        assert follows == V - 1 if path else p[follows] > 0


def test_a_token_at_the_threshold_is_not_typical():
    p = torch.tensor([[row_of(0.5, 0.5), row_of(1.0)]])
    tree = chain_of([0])
    numbers = uniform(1, tree)
    assert plainly(rules.Typical(epsilon=0.5, delta=1.0)(tree, p, numbers))[0][0] == ()
    assert plainly(rules.Typical(epsilon=0.49, delta=1.0)(tree, p, numbers))[0][0] == (0,)
    assert rules.Typical(epsilon=0.5, delta=1.0).divergence(tree, p) == 0  # rejected, and drawn from p
    assert rules.Typical(epsilon=0.49, delta=1.0).divergence(tree, p).tolist() == pytest.approx([0.5])


def test_the_longest_typical_path_wins_and_the_first_of_equals():
    #      root
    #   0     1     2      2 is not typical
    #   3   4   5   6
    parents = [-1, -1, -1, 0, 1, 1, 2]
    p = torch.tensor([[row_of(0.5, 0.5)] * 8])
    p[0, 5] = torch.tensor(row_of(0.0, 0.0, 1.0))  # behind node 4
    p[0, 6] = torch.tensor(row_of(0.0, 0.0, 0.0, 1.0))  # behind node 5
    trees = [
        tree_of(tokens, parents)
        for tokens in (
            [0, 1, 5, 5, 0, 1, 0],
            [0, 1, 5, 5, 5, 1, 0],
            [5, 1, 5, 5, 5, 5, 0],
            [5, 5, 5, 0, 1, 1, 0],  # typical, but nothing leads there
        )
    ]
    together = DraftTrees.join(trees)
    found = plainly(rules.Typical()(together, p.expand(4, 8, V), uniform(4, together)))
    assert found[:2] == [((1, 4), 2), ((1, 5), 3)]
    assert [path for path, _ in found[2:]] == [(1,), ()]
    for tree, (path, _) in zip(trees, found, strict=True):
        assert plainly(rules.Typical()(tree, p, uniform(1, tree)))[0][0] == path
    there = [True, True, True, True, False, True, True]
    cut = tree_of([0, 1, 5, 5, 0, 1, 0], parents, alive=there)  # what is no draft is not accepted
    assert plainly(rules.Typical()(cut, p, uniform(1, cut))) == [((1, 5), 3)]


@pytest.mark.parametrize("rule", [rules.Ears(0.3), rules.Typical()], ids=str)
def test_lossy_rules_without_a_draft_are_plain_sampling(rule):
    p = torch.tensor([0.1, 0.2, 0.4, 0.0, 0.3, 0.0])
    nothing = empty(DRAWS, torch.device("cpu"))
    verdict = rule(nothing, p.expand(DRAWS, 1, V), uniform(DRAWS, nothing))
    assert verdict.path.shape == (DRAWS, 0) and not verdict.accepted.any()
    assert goodness_of_fit(verdict.next_token, p) > REJECTED


@pytest.mark.parametrize("tolerance", [-0.1, float("nan")])
def test_a_tolerance_below_zero_is_refused(tolerance):
    with pytest.raises(UserError, match=f"tolerance is {tolerance}: expected 0 .* or a positive number"):
        rules.Ears(tolerance)


def test_limits_of_the_lossy_rules_are_allowed():
    for rule in (rules.Typical(0.0, 0.0), rules.Typical(1.0, 1.0), rules.Ears(0.0)):
        assert rules.describe(rule).startswith("lossy: ")
    assert rules.describe(rules.Ears()) == "lossy: Ears(tolerance=0.1)"
    assert rules.describe(rules.Typical()) == "lossy: Typical(epsilon=0.09, delta=0.3)"


@pytest.mark.parametrize("thresholds", [{"epsilon": -0.1}, {"epsilon": 1.1}, {"delta": -0.1}, {"delta": 2.0}])
def test_thresholds_outside_probabilities_are_refused(thresholds):
    with pytest.raises(UserError, match=r"typical acceptance has .*: expected both within 0 to 1"):
        rules.Typical(**thresholds)


@pytest.mark.parametrize("kind", ["near", "far", "missing"])
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("rule", [rules.Ears(0.4), rules.Typical()], ids=str)
def test_the_divergence_that_is_printed_is_that_of_what_is_emitted(kind, sampled, rule):
    process = Markov(kind, Sampling(1.2))
    p = process.p[0].expand(1, 2, V)
    if sampled:
        tree = chain_of([0], process.q[:1])
        expected = ears_chain(process, 0.4) if isinstance(rule, rules.Ears) else typical_chain(process, rule)
    else:  # the first token's distribution given the candidate, by counting
        tree = chain_of([int(process.q[0].argmax())])
        _, accepted, token = rule(repeat(tree, DRAWS), p.expand(DRAWS, -1, -1), uniform(DRAWS, tree))
        expected = torch.bincount(torch.where(accepted > 0, tree.tokens[:, 0], token), minlength=V) / DRAWS
    noise = 1e-5 if sampled else 0.01
    assert rule.divergence(tree, p).tolist() == pytest.approx([total_variation(expected, process.p[0])], abs=noise)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("rule", [rules.Ears(0.4), rules.Typical()], ids=str)
def test_what_follows_the_first_token_does_not_change_its_divergence(rule, sampled):
    process = Markov("far", Sampling(1.2))
    tokens, p, q = [0, 3, 1], process.p[[0, 2, 4, 5]], process.q[[0, 2, 4]]
    assert not torch.equal(p[0], p[1]) and not torch.equal(q[0], q[1])
    alone = chain_of(tokens[:1], q[:1] if sampled else None)
    longer = chain_of(tokens, q if sampled else None)
    assert rule.divergence(longer, p[None]) == rule.divergence(alone, p[None, :2]) > 0


def test_a_draft_drawn_from_the_target_itself_diverges_by_nothing():
    p = Markov("far", Sampling(1.2)).p[:2].clone()
    p[0, 3:] = 0.0  # what neither says
    p[0] /= p[0].sum()
    assert rules.Ears(0.4).divergence(chain_of([0], p[:1]), p[None]).tolist() == pytest.approx([0], abs=1e-6)


@pytest.mark.parametrize("rule", [rules.Ears(0.4), rules.Typical()], ids=str)
def test_requests_diverge_each_on_its_own_and_not_without_a_draft(rule):
    process = Markov("far", Sampling(1.2))
    trees = [chain_of([0, 3], process.q[[0, 1]]), empty(1, torch.device("cpu")), chain_of([2], process.q[:1])]
    p = process.p[:3].expand(3, 3, V)
    alone = [rule.divergence(tree, p[:1, : tree.num_nodes + 1]).item() for tree in trees]
    assert alone[0] > 0 == alone[1]
    assert rule.divergence(DraftTrees.join(trees), p).tolist() == alone
    cut = repeat(trees[0], 2).truncate(torch.tensor([0, 1]))  # at the context's end
    assert rule.divergence(cut, p[:2]).tolist() == [0, alone[0]]


def test_divergence_is_known_for_chains_only():
    p = torch.full((1, 3, V), 1 / V)
    assert rules.Typical().divergence(empty(1, torch.device("cpu")), p[:, :1]) == 0
    with pytest.raises(ValueError, match="chains only"):
        rules.Typical().divergence(tree_of([1, 2], [ROOT, ROOT]), p)
    assert (
        "lossy" in rules.describe(rules.Typical()) and rules.describe(rules.rejection_sampling) == "rejection sampling"
    )
