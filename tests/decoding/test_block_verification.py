"""Block verification is lossless, by the chi-square of joint outcomes, and accepts more than token by token.

Its formulas stand here a second time, token by token in Python, right or with one of them gone wrong: the right form
gives what the rule gives, draw for draw, and the test of chance rejects the wrong ones.
"""

import pytest
import torch

from specdraft.decoding import rules
from specdraft.decoding.block_verification import block_verification
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.rules import Verdict
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.tree import DraftTrees, empty
from specdraft.errors import UserError
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.targets import Target
from tests.chance import REJECTED
from tests.decoding.markov import Markov, V
from tests.decoding.plain_rules import draw
from tests.decoding.trees import chain_of, chance, plainly, repeat, tree_of, uniform
from tests.fakes import TargetAsDraft, tiny_llama

DRAWS, FEW = 20000, 4000


def plain(fault="none"):
    """The rule, one request after the other, from the same numbers."""

    def one(tokens, q, p, u, last):
        kept, weight = 0, 1.0
        rest = [max(a - b, 0.0) for a, b in zip(p[0], q[0], strict=True)] if tokens else p[0]
        for place, token in enumerate(tokens):
            weight *= p[place][token] / q[place][token]
            weight = weight if fault == "more than one" else min(1.0, weight)
            here = 1.0 if fault == "forgets the weight" else weight
            drafted = q[place + 1] if place + 1 < len(tokens) else [0.0] * V
            left = [max(here * a - b, 0.0) for a, b in zip(p[place + 1], drafted, strict=True)]
            spare = sum(left)
            ratio = weight if place + 1 == len(tokens) else spare / (spare + 1 - weight) if spare else 0.0
            if fault == "weights alone":
                ratio = weight
            if u[place] < ratio:
                kept, rest = place + 1, left
            elif fault == "stops at the first":
                break
        if fault == "plain remainder" and kept < len(tokens):
            rest = [max(a - b, 0.0) for a, b in zip(p[kept], q[kept], strict=True)]
        return kept, draw(rest if sum(rest) > 0 else p[kept], last)

    def rule(trees, p, numbers):
        alive = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool)).sum(-1).tolist()
        parts = (part.tolist() for part in (trees.tokens, trees.q, p, numbers[:, 1:], numbers[:, 0]))
        found = [one(t[:n], q[:n], *rest) for n, t, q, *rest in zip(alive, *parts, strict=True)]
        path = torch.arange(trees.depth).expand(len(found), -1)
        return Verdict(path, *(torch.tensor(column) for column in zip(*found, strict=True)))

    return rule


SETTINGS = [(Sampling(1.0), 2), (Sampling(1.5, top_k=3), 2), (Sampling(0.7, top_p=0.9), 3), (Sampling(1.5), 3)]


@pytest.mark.parametrize(("sampling", "num_draft"), SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["near", "far", "missing"])
def test_it_emits_what_plain_sampling_would(kind, sampling, num_draft):
    markov = Markov(kind, sampling)
    texts, accepted = markov.emit(block_verification, markov.grown(StaticTree.chain(num_draft)), DRAWS)
    assert min(markov.fits(texts)) > REJECTED
    assert 0 < int(accepted.sum()) < num_draft * DRAWS  # both ways were taken


@pytest.mark.parametrize(("kind", "gain"), [("near", 1.01), ("far", 1.08)])
def test_it_accepts_more_than_token_by_token(kind, gain):
    markov = Markov(kind, Sampling(1.5))
    draft = markov.grown(StaticTree.chain(3))
    rates = [markov.emit(rule, draft, DRAWS)[1].sum() for rule in (block_verification, rules.rejection_sampling)]
    assert rates[0] > gain * rates[1]


def ragged(draft):
    """The chains of every second request end after their first token, for no reason of their own."""

    def shorter(numbers):
        trees = draft(numbers)
        rooms = 1 + numbers.lengths % 2 * trees.depth
        return trees.truncate(rooms)

    return shorter


def test_chains_of_several_lengths_are_each_judged_as_long_as_they_are():
    markov = Markov("far", Sampling(1.0))
    draft = ragged(markov.grown(StaticTree.chain(2)))
    texts, accepted = markov.emit(block_verification, draft, DRAWS)
    assert min(markov.fits(texts)) > REJECTED
    assert int(accepted[::2].max()) == 1 and int(accepted[1::2].max()) == 2


@pytest.mark.parametrize("kind", ["near", "far", "missing"])
def test_it_is_its_plain_form_draw_for_draw(kind):
    markov = Markov(kind, Sampling(1.0))
    numbers = chance(500)
    for draft in (markov.grown(StaticTree.chain(3)), ragged(markov.grown(StaticTree.chain(3)))):
        trees = draft(numbers)
        arguments = trees, markov.after(trees), numbers.uniform(0, 4)
        assert plainly(block_verification(*arguments)) == plainly(plain()(*arguments))


FAULTS = ["more than one", "forgets the weight", "weights alone", "stops at the first", "plain remainder"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_test_rejects_wrong_rules(fault):
    markov = Markov("far", Sampling(1.5))
    texts, _ = markov.emit(plain(fault), markov.grown(StaticTree.chain(3)), FEW)
    assert min(markov.fits(texts)) < REJECTED / 100


def test_chosen_tokens_and_empty_drafts_are_verified_as_ever():
    p = Markov("near", Sampling(1.0)).p[:4].expand(200, 4, V)
    for trees in (repeat(chain_of([1, 2, 3]), 200), repeat(tree_of([1, 2, 3], [-1, -1, 0]), 200), empty(200, p.device)):
        rows = p[:, : trees.num_nodes + 1]
        numbers = uniform(200, trees)
        expected = plainly(rules.rejection_sampling(trees, rows, numbers))
        assert plainly(block_verification(trees, rows, numbers)) == expected


def test_a_draft_by_the_target_itself_is_always_accepted():
    target = Target.from_model(tiny_llama(V, seed=3, initializer_range=0.25))
    result = Decoder(target, TargetAsDraft(), 3, Sampling(1.0), block_verification).generate([1, 4, 2], 33)
    assert result.accepted == [3] * 8


def test_no_number_is_read_from_the_device():
    tree = chain_of([1, 2, 3], torch.ones(3, V))
    there = DraftTrees(*(part.to("meta") for part in (tree.tokens, tree.parents, tree.q)), depth=3)
    p, numbers = torch.empty(1, 4, V, device="meta"), torch.empty(1, 4, dtype=torch.float64, device="meta")
    assert [part.shape for part in block_verification(there, p, numbers)] == [(1, 3), (1,), (1,)]


@pytest.mark.parametrize("shape", [DynamicTree(2, 2, 4), StaticTree(((0,), (1,)))], ids=str)
def test_trees_are_refused_before_any_work(shape):
    with pytest.raises(UserError, match=r"decoding/rule=block cannot verify a .* tree of .*: expected .*chain"):
        EvaluationSettings(shape=shape, rule=block_verification)
    with pytest.raises(UserError, match="expected decoding/shape=chain"):
        Decoder(None, TargetAsDraft(), shape, Sampling(1.0), block_verification)
    with pytest.raises(UserError, match="a tree that is measured"):
        EvaluationSettings(shape=lambda drafter, target: shape, rule=block_verification)
    with pytest.raises(ValueError, match="without branches"):
        block_verification(tree_of([1, 2], [-1, -1], torch.ones(2, V)), torch.ones(1, 3, V), torch.zeros(1, 3))
