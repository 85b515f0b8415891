"""Both rules are lossless: greedy token by token, rejection sampling by the chi-square of joint outcomes.

Two tokens are emitted as the decode loop emits them: what the rule gives for a chain, then plain sampling if that was
one token only. Every test of chance is repeated with rules that are wrong in one place, and must reject those.
"""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.tree import ROOT, DraftTree
from tests.chance import REJECTED, goodness_of_fit, plain_probabilities, same_rate

V, DRAWS = 6, 2000
KINDS = ["near", "far", "missing", "deterministic"]


class Process(NamedTuple):
    """A target and a draft over two steps: first tokens ``[V]``, second tokens ``[V, V]`` given the first."""

    p: tuple[Tensor, Tensor]
    q: tuple[Tensor, Tensor]  # one-hot rows for deterministic candidates
    exact: Tensor  # [V, V], the joint distribution by plain formulas
    deterministic: bool


def process(kind: str, sampling: Sampling) -> Process:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(1 + V, V, generator=g)  # row 0 begins, row 1 + x follows x
    noise = torch.randn(1 + V, V, generator=g)
    drafted = logits + 0.3 * noise if kind == "near" else 2 * noise
    if kind == "missing":  # a draft vocabulary of half the tokens
        drafted[:, ::2] = -torch.inf
    p = sampling.probabilities(logits)
    q = Sampling().probabilities(drafted) if kind == "deterministic" else sampling.probabilities(drafted)
    plain = torch.stack([plain_probabilities(row, sampling) for row in logits])
    return Process((p[0], p[1:]), (q[0], q[1:]), plain[0][:, None] * plain[1:], kind == "deterministic")


def two_tokens(rule, process: Process, num_draft: int, seed: int) -> tuple[Tensor, Tensor]:
    """Emitted pairs ``[DRAWS]`` as first * V + second, and how many drafted tokens were accepted ``[DRAWS]``."""
    g = torch.Generator().manual_seed(seed)
    first = sample(process.q[0].expand(DRAWS, V), g)
    chains = torch.stack([first, sample(process.q[1][first], g)], dim=1)[:, :num_draft]
    bonus = torch.full((V,), 1 / V)  # behind the second token: never looked at
    pairs, accepted = [], []
    for chain in chains:
        q = torch.stack([process.q[0], process.q[1][chain[0]]])[:num_draft]
        p = torch.stack([process.p[0], process.p[1][chain[0]], bonus])[: num_draft + 1]
        verdict = rule(DraftTree.chain(chain, None if process.deterministic else q), p, g)
        emitted = [*chain[: len(verdict.path)].tolist(), verdict.next_token]
        if len(emitted) == 1:
            emitted.append(int(sample(process.p[1][emitted[0]], g)))
        pairs.append(emitted[0] * V + emitted[1])
        accepted.append(len(verdict.path))
    return torch.tensor(pairs), torch.tensor(accepted)


@cache
def drawn(kind: str, sampling: Sampling, num_draft: int) -> tuple[Tensor, Tensor]:
    """What the rule itself emits and accepts."""
    return two_tokens(rules.rejection_sampling, process(kind, sampling), num_draft, seed=2)


def fits(pairs: Tensor, exact: Tensor) -> tuple[float, float]:
    """p-values of the first token and of both together."""
    return goodness_of_fit(pairs // V, exact.sum(1)), goodness_of_fit(pairs, exact)


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
    pairs, _ = drawn(kind, sampling, num_draft)
    one_step, two_steps = fits(pairs, process(kind, sampling).exact)
    assert one_step > REJECTED
    assert two_steps > REJECTED


def wrong(fault: str):
    """Rejection sampling with one line of it gone wrong."""

    def rule(tree: DraftTree, p: Tensor, generator: torch.Generator) -> rules.Verdict:
        for node, token in enumerate(tree.tokens.tolist()):
            q = torch.nn.functional.one_hot(tree.tokens[node], V).float() if tree.q is None else tree.q[node]
            threshold = p[node, token] if fault == "q is forgotten" else p[node, token] / q[token]
            if fault == "accepts everything" or torch.rand((), generator=generator) < threshold:
                continue
            residual = (p[node] - q).clamp(min=0)
            if fault == "correction from p":
                residual = p[node]
            elif fault == "correction without the token":
                residual = p[node].clone()
                residual[token] = 0
            return rules.Verdict(tuple(range(node)), int(sample(residual, generator)))
        bonus = p[-2] if fault == "bonus a row too early" else p[-1]
        return rules.Verdict(tuple(range(len(tree))), int(sample(bonus, generator)))

    return rule


@pytest.mark.parametrize(
    ("fault", "kind", "num_draft"),
    [
        ("accepts everything", "near", 2),
        ("accepts everything", "deterministic", 2),
        ("q is forgotten", "far", 2),
        ("correction from p", "far", 2),
        ("correction from p", "missing", 2),
        ("correction from p", "deterministic", 2),
        ("correction without the token", "far", 2),
        ("bonus a row too early", "near", 1),
    ],
)
def test_the_same_test_rejects_wrong_rules(fault, kind, num_draft):
    case = process(kind, Sampling(1.0))
    pairs, _ = two_tokens(wrong(fault), case, num_draft, seed=2)
    assert min(fits(pairs, case.exact)) < REJECTED / 1000


def test_the_plain_form_of_the_rule_is_not_rejected():
    # The wrong rules above are wrong by their fault alone.
    case = process("far", Sampling(1.0))
    pairs, _ = two_tokens(wrong("none"), case, 2, seed=2)
    assert min(fits(pairs, case.exact)) > REJECTED


@pytest.mark.parametrize("sampling", [sampling for sampling, num_draft in SETTINGS if num_draft == 2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_is_one_minus_total_variation(kind, sampling):
    case = process(kind, sampling)
    _, accepted = drawn(kind, sampling, 2)
    overlap = [torch.minimum(p, q) for p, q in zip(case.p, case.q, strict=True)]
    first = overlap[0].sum().item()  # 1 - TV; p(x) for a candidate x
    second = (overlap[0] * overlap[1].sum(-1)).sum().item()
    assert same_rate(int((accepted >= 1).sum()), DRAWS, first) > REJECTED
    assert same_rate(int((accepted >= 2).sum()), DRAWS, second) > REJECTED
    assert same_rate(int((accepted >= 1).sum()), DRAWS, first - 0.1 if first > 0.5 else first + 0.1) < REJECTED


def test_a_draft_from_the_target_itself_is_always_accepted():
    p = torch.rand(4, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    g = torch.Generator().manual_seed(1)
    for _ in range(300):
        tree = DraftTree.chain(sample(p[:3], g), p[:3].clone())
        assert rules.rejection_sampling(tree, p, g).path == (0, 1, 2)


def test_certain_and_impossible_candidates():
    g = torch.Generator().manual_seed(0)
    p = torch.eye(V)[[2, 4, 1]]  # the target knows what it wants
    for _ in range(50):
        assert rules.rejection_sampling(DraftTree.chain(torch.tensor([2, 4])), p, g) == ((0, 1), 1)
        assert rules.rejection_sampling(DraftTree.chain(torch.tensor([2, 3])), p, g) == ((0,), 4)
        assert rules.rejection_sampling(DraftTree.chain(torch.tensor([0, 4])), p, g) == ((), 2)


def test_what_the_target_never_says_is_rejected_even_by_a_draw_of_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.zeros(*size, dtype=options["dtype"]))
    p = torch.tensor([[0.0, 0.0, 1.0]] * 3)
    siblings = DraftTree(torch.tensor([0, 1]), torch.tensor([ROOT, ROOT]))
    for draft in (DraftTree.chain(torch.tensor([0])), siblings):
        assert rules.rejection_sampling(draft, p, None) == ((), 2)


def test_a_rejection_that_only_rounding_explains_draws_from_the_target(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.ones(*size, dtype=options["dtype"]))
    p = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])  # r = norm(max(p - q, 0)) would be 0 / 0
    assert rules.rejection_sampling(DraftTree.chain(torch.tensor([1]), p[:1].clone()), p, None) == ((), 1)


def test_an_empty_draft_is_plain_decoding():
    nothing = DraftTree.chain(torch.empty(0, dtype=torch.int64))
    p = torch.tensor([[0.1, 0.2, 0.4, 0.0, 0.3, 0.0]])
    g = torch.Generator().manual_seed(0)
    verdicts = [rules.rejection_sampling(nothing, p, g) for _ in range(2000)]
    assert {verdict.path for verdict in verdicts} == {()}
    assert goodness_of_fit(torch.tensor([verdict.next_token for verdict in verdicts]), p[0]) > REJECTED
    assert rules.greedy(nothing, torch.tensor([5])) == ((), 5)


@pytest.mark.parametrize(
    ("drafted", "verdict"),
    [
        ([7, 8, 9], ((0, 1, 2), 10)),
        ([7, 8, 1], ((0, 1), 9)),
        ([7, 1, 9], ((0,), 8)),  # what is right behind a wrong token does not count
        ([1, 8, 9], ((), 7)),
        ([8, 9, 10], ((), 7)),
    ],
)
def test_greedy_accepts_the_common_prefix(drafted, verdict):
    assert rules.greedy(DraftTree.chain(torch.tensor(drafted)), torch.tensor([7, 8, 9, 10])) == verdict


def test_a_chain_knows_its_parents():
    tree = DraftTree.chain(torch.tensor([5, 6, 7]))
    assert tree.parents.tolist() == [-1, 0, 1]
    assert len(tree) == 3
    assert tree.is_chain
    assert not DraftTree(torch.tensor([5, 6]), torch.tensor([-1, -1])).is_chain
