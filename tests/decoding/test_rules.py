"""Both rules are lossless: greedy token by token, rejection sampling on chains by the chi-square of joint outcomes.

Three tokens are emitted as the decode loop emits them: what the rule gives for a chain, then plain sampling if that was
fewer. Every test of chance is repeated with rules that are wrong in one place, and must reject those.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.tree import DraftTrees, empty
from tests.chance import REJECTED, goodness_of_fit, same_rate
from tests.decoding.markov import Draft, Markov, V
from tests.decoding.plain_rules import plain
from tests.decoding.trees import chain_of, plainly, repeat, shared_out, tree_of, uniform

DRAWS, FEW = 20000, 4000
KINDS = ["near", "far", "missing", "deterministic"]


def process(kind: str, sampling: Sampling, num_draft: int) -> tuple[Markov, Draft]:
    markov = Markov("far" if kind == "deterministic" else kind, sampling)
    return markov, markov.grown(StaticTree.chain(num_draft, sampled=kind != "deterministic"))


@cache
def drawn(kind: str, sampling: Sampling, num_draft: int) -> tuple[Markov, Tensor, Tensor]:
    """What the rule itself emits and accepts."""
    markov, draft = process(kind, sampling, num_draft)
    return markov, *markov.emit(rules.rejection_sampling, draft, DRAWS)


SETTINGS = [
    (Sampling(0.5), 2),
    (Sampling(1.0), 2),
    (Sampling(1.5), 2),
    (Sampling(1.0, top_p=0.8), 2),
    (Sampling(1.5, top_k=3), 2),
    (Sampling(1.0), 1),  # the second token is a bonus
]


@pytest.mark.parametrize(("sampling", "num_draft"), SETTINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rejection_sampling_emits_what_plain_sampling_would(kind, sampling, num_draft):
    markov, texts, accepted = drawn(kind, sampling, num_draft)
    assert min(markov.fits(texts)) > REJECTED
    assert 0 < int(accepted.sum()) < num_draft * DRAWS  # both ways were taken


@pytest.mark.parametrize(
    ("fault", "kind", "num_draft"),
    [
        ("accepts the first", "near", 2),
        ("accepts the first", "deterministic", 2),
        ("q is forgotten", "far", 2),
        ("correction from p", "far", 2),
        ("correction from p", "missing", 2),
        ("correction from p", "deterministic", 2),
        ("only the token goes", "far", 2),
        ("bonus a row too early", "near", 1),
    ],
)
def test_the_same_test_rejects_wrong_rules(fault, kind, num_draft):
    markov, draft = process(kind, Sampling(1.0), num_draft)
    texts, _ = markov.emit(plain(fault), draft, FEW)
    assert min(markov.fits(texts)) < REJECTED / 1000


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_form_of_the_rule_is_not_rejected(kind):
    # The wrong rules above are wrong by their fault alone.
    markov, draft = process(kind, Sampling(1.0), 2)
    texts, _ = markov.emit(plain(), draft, FEW)
    assert min(markov.fits(texts)) > REJECTED


@pytest.mark.parametrize("sampling", [sampling for sampling, num_draft in SETTINGS if num_draft == 2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_is_one_minus_total_variation(kind, sampling):
    markov, _, accepted = drawn(kind, sampling, 2)
    q = markov.q
    if kind == "deterministic":
        q = torch.nn.functional.one_hot(markov.logits[1].argmax(-1), V)
    overlap = torch.minimum(markov.p, q).double()  # [1 + V, V]
    first = overlap[0].sum().item()  # 1 - TV; p(x) for a candidate x
    second = (overlap[0] * overlap[1:].sum(-1)).sum().item()
    assert same_rate(int((accepted >= 1).sum()), DRAWS, first) > REJECTED
    assert same_rate(int((accepted >= 2).sum()), DRAWS, second) > REJECTED
    assert same_rate(int((accepted >= 1).sum()), DRAWS, first - 0.1 if first > 0.5 else first + 0.1) < REJECTED


def test_a_draft_from_the_target_itself_is_always_accepted():
    p = torch.rand(4, V, generator=torch.Generator().manual_seed(0)).softmax(-1).expand(3000, 4, V)
    trees = DraftTrees.chains(sample(p[:, :3], uniform(3000, chain_of([0, 0]), seed=1)), p[:, :3])
    verdict = rules.rejection_sampling(trees, p, uniform(3000, trees, seed=2))
    assert {path for path, _ in plainly(verdict)} == {(0, 1, 2)}


def test_certain_and_impossible_candidates():
    p = torch.eye(V)[[2, 4, 1]].expand(50, 3, V)  # the target knows what it wants
    for tokens, verdict in (([2, 4], ((0, 1), 1)), ([2, 3], ((0,), 4)), ([0, 4], ((), 2))):
        chosen = repeat(chain_of(tokens), 50)
        for trees in (chosen, DraftTrees.chains(chosen.tokens, torch.full((50, 2, V), 1 / V))):
            assert plainly(rules.rejection_sampling(trees, p, uniform(50, trees))) == [verdict] * 50


NEARLY_ONE = 1 - 2.0**-53  # the largest number that ``Chance`` makes


@pytest.mark.parametrize("number", [0.0, NEARLY_ONE])
def test_what_the_target_never_says_is_rejected_by_every_draw(number):
    p = torch.tensor([[[0.0, 0.0, 1.0]] * 3])
    q = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    for claimed in (None, q):
        siblings = tree_of([0, 1], [-1, -1], claimed)
        for draft in (chain_of([0], None if claimed is None else q[:1]), siblings):
            numbers = torch.full((1, draft.num_nodes + 1), number, dtype=torch.float64)
            assert plainly(rules.rejection_sampling(draft, p[:, : draft.num_nodes + 1], numbers)) == [((), 2)]


def test_a_rejection_that_only_rounding_explains_draws_from_the_target():
    p = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])  # r = norm(max(p - q, 0)) would be 0 / 0
    draft, numbers = chain_of([1], p[0, :1]), torch.full((1, 2), 0.5, dtype=torch.float64)
    shared_out(numbers)[0].fill_(1.0)
    assert plainly(rules.rejection_sampling(draft, p, numbers)) == [((), 1)]


def test_an_empty_draft_is_plain_decoding():
    nothing = empty(2000, torch.device("cpu"))
    p = torch.tensor([0.1, 0.2, 0.4, 0.0, 0.3, 0.0])
    verdict = rules.rejection_sampling(nothing, p.expand(2000, 1, V), uniform(2000, nothing))
    assert verdict.path.shape == (2000, 0) and not verdict.accepted.any()
    assert goodness_of_fit(verdict.next_token, p) > REJECTED
    assert plainly(rules.greedy(empty(2, torch.device("cpu")), torch.tensor([[5], [3]]))) == [((), 5), ((), 3)]


GREEDY = [
    ([7, 8, 9], ((0, 1, 2), 10)),
    ([7, 8, 1], ((0, 1), 9)),
    ([7, 1, 9], ((0,), 8)),  # what is right behind a wrong token does not count
    ([1, 8, 9], ((), 7)),
    ([8, 9, 10], ((), 7)),
]


@pytest.mark.parametrize(("drafted", "verdict"), GREEDY)
def test_greedy_accepts_the_common_prefix(drafted, verdict):
    assert plainly(rules.greedy(chain_of(drafted), torch.tensor([[7, 8, 9, 10]]))) == [verdict]


def test_greedy_follows_each_request_on_its_own():
    trees = DraftTrees.chains(torch.tensor([drafted for drafted, _ in GREEDY]))
    best = torch.tensor([[7, 8, 9, 10]]).expand(len(GREEDY), 4)
    assert plainly(rules.greedy(trees, best)) == [verdict for _, verdict in GREEDY]


@pytest.mark.parametrize("rule", [rules.rejection_sampling, rules.Ears(), rules.Typical()], ids=rules.describe)
@pytest.mark.parametrize("kind", ["chain", "tree", "chosen tree", "nothing"])
def test_no_rule_reads_a_number_from_the_device(rule, kind):
    """On the meta device there are none."""
    bush = tree_of([1, 2, 3, 4], [-1, -1, 0, 0], torch.ones(4, V), [True, True, True, False])
    trees = {"chain": chain_of([1, 2, 3], torch.ones(3, V)), "tree": bush, "nothing": empty(1, torch.device("cpu"))}
    tree = trees.get(kind, tree_of([1, 2, 3], [-1, -1, 0]))
    parts = (tree.tokens, tree.parents, tree.q, tree.alive)
    there = DraftTrees(
        *(None if part is None else part.to("meta") for part in parts), depth=tree.depth, width=tree.width
    )
    p = torch.empty(1, tree.num_nodes + 1, V, device="meta")
    verdict = rule(there, p, torch.empty(1, tree.num_nodes + 1, dtype=torch.float64, device="meta"))
    assert [part.shape for part in verdict] == [(1, tree.depth), (1,), (1,)]
    assert [part.shape for part in rules.greedy(there, p.argmax(-1))] == [(1, tree.depth), (1,), (1,)]
