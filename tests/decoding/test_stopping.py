"""Chains that end where the draft is unsure: the formulas by hand, and that they leave the distribution exact.

The test of chance is repeated with a draft that drops tokens for what they are, and must reject that.
"""

import math
from dataclasses import replace

import pytest
import torch

from specdraft.decoding import rules
from specdraft.decoding.block_verification import block_verification
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import (
    Confidence,
    EntropyBound,
    Learned,
    Recording,
    evidence,
    learn_weights,
)
from specdraft.errors import UserError
from tests.chance import REJECTED
from tests.decoding.markov import Markov
from tests.decoding.trees import chance

DRAWS, FEW = 20000, 4000


STOPS = [
    Confidence(0.5),
    Confidence(0.3, joint=True),
    EntropyBound(0.2, 0.45),
]
STOPS += [Learned(0.45, (0.5, 1.5, -0.5, 0.8))]


def test_confidence_is_of_the_next_token_or_of_the_whole_chain():
    q = torch.tensor([[0.6, 0.4, 0.0], [0.45, 0.3, 0.25]])
    kept = torch.tensor([0.5, 1.0])
    assert Confidence(0.5)(q, kept).tolist() == [False, True]
    assert Confidence(0.4, joint=True)(q, kept).tolist() == [True, False]
    assert Confidence(0.0)(q, kept).tolist() == [False, False]


def test_entropy_bound():
    q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    bound = 1 - math.sqrt(0.2 * math.log(2))
    assert EntropyBound(0.2, bound + 1e-4)(q, torch.ones(2)).tolist() == [True, False]
    assert EntropyBound(0.2, bound - 1e-4)(q, torch.ones(2)).tolist() == [False, False]


def test_learned_is_a_logistic_regression():
    q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    kept = torch.tensor([0.5, 0.0])
    found = evidence(q, kept)
    assert found[0].tolist() == pytest.approx([1.0, math.log(0.5), math.log(2), math.log(0.5)])
    assert found[1, :3].tolist() == [1.0, 0.0, 0.0] and math.isfinite(found[1, 3])
    weights = (1.0, 2.0, -0.5, 0.25)
    score = 1 + 2 * math.log(0.5) - 0.5 * math.log(2) + 0.25 * math.log(0.5)
    chance_of_it = 1 / (1 + math.exp(-score))
    for least, ends in ((chance_of_it + 1e-4, True), (chance_of_it - 1e-4, False)):
        assert Learned(least, weights)(q[:1], kept[:1]).tolist() == [ends]
    assert Learned()(q, kept).tolist() == [False, False] and Learned().lacks and not Learned(0.3, weights).lacks
    assert hash(Learned(0.3, list(weights))) == hash(Learned(0.3, weights))
    assert str(Learned()) == "while accepted with 0.3, as is to be learned"
    for options, said in (((1.2,), "a chance of 1.2"), ((0.3, [1.0]), "by 1 learned weights: expected 4")):
        with pytest.raises(UserError, match=said):
            Learned(*options)


def test_weights_are_those_that_made_the_data():
    made = torch.tensor([0.4, 1.2, -0.7, 0.9])
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((40000, 8), generator=generator)
    found = evidence(logits.softmax(-1), torch.rand(40000, generator=generator))
    accepted = torch.rand(40000, generator=generator) < (found @ made).sigmoid()
    assert learn_weights(found, accepted) == pytest.approx(made.tolist(), abs=0.15)


@pytest.mark.parametrize("accepted", [True, False])
def test_weights_are_finite_where_all_ended_alike(accepted):
    found = evidence(torch.rand((30, 5)).softmax(-1), torch.rand(30))
    weights = learn_weights(found, torch.full((30,), accepted))
    assert all(abs(weight) < 20 for weight in weights)
    assert ((found @ torch.tensor(weights)).sigmoid() > 0.5).eq(accepted).all()


def test_a_recording_ends_nothing():
    recording = Recording()
    q, kept = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([1.0, 1e-9])
    assert recording(q, kept).tolist() == [False, False]
    assert torch.equal(recording.found[0], evidence(q, kept)) and hash(recording) == id(recording)


@pytest.mark.parametrize("rule", [rules.rejection_sampling, block_verification], ids=rules.describe)
@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("sampled", [True, False])
def test_what_is_emitted_is_what_plain_sampling_would(stop, rule, sampled):
    markov = Markov("far", Sampling(1.0))
    draft = markov.grown(StaticTree.chain(3, sampled, stop))
    texts, accepted = markov.emit(rule, draft, DRAWS)
    assert min(markov.fits(texts)) > REJECTED
    drafted = draft(chance(200)).beneath(torch.ones(200, 1, dtype=torch.bool)).sum(-1)
    assert not sampled or len(set(drafted.tolist())) > 1  # they do end early, one sooner than another
    assert int(accepted.sum()) > 0


def drops_what_is_unlikely(draft, least):
    """A wrong rule: a token is drawn, and dropped with all after it if the draft finds that very token unlikely."""

    def shorter(numbers):
        trees = draft(numbers)
        likely = trees.q.gather(2, trees.tokens[..., None])[..., 0] >= least
        return replace(trees, alive=likely if trees.alive is None else likely & trees.alive)

    return shorter


@pytest.mark.parametrize("rule", [rules.rejection_sampling, block_verification], ids=rules.describe)
def test_the_same_test_rejects_a_rule_that_drops_drawn_tokens(rule):
    markov = Markov("far", Sampling(1.0))
    for stop in (None, Confidence(0.5)):
        draft = drops_what_is_unlikely(markov.grown(StaticTree.chain(3, stop=stop)), 0.5)
        texts, _ = markov.emit(rule, draft, FEW)
        assert min(markov.fits(texts)) < REJECTED / 1000


def test_without_a_reason_to_stop_nothing_changes():
    markov = Markov("far", Sampling(1.2, top_p=0.95))
    numbers = chance(50)
    for sampled in (True, False):
        one, other = (markov.grown(StaticTree.chain(3, sampled, s))(numbers) for s in (None, Confidence(0.0)))
        assert torch.equal(one.tokens, other.tokens) and bool(other.alive.all())
        assert one.q is None if not sampled else torch.equal(one.q, other.q)


def test_drafts_end_where_all_requests_do(target, answers, untrained):
    """Nothing is drafted beyond, and the tokens are the target's own, alone and side by side."""
    head, count = untrained(target), 24
    stop = Confidence(1e-3, joint=True)
    expected = [tokens[:count] for tokens in answers.continuations[:12]]
    for batch_size in (1, 5):
        found = Decoder(target, head, StaticTree.chain(6, stop=stop)).generate_batch(
            answers.prompts[:12], count, batch_size
        )
        assert [each.tokens for each in found] == expected
        lengths = {drafted for each in found for drafted in each.drafted}
        assert len(lengths) > 2
        if batch_size == 1:
            alone = [each.drafted for each in found]
    assert [each.drafted for each in found] == alone


def test_nothing_is_read_for_a_level_that_nobody_drafts(target, untrained, monkeypatch):
    head = untrained(target)
    batch = Requests(Decoder(target, head, StaticTree.chain(6, stop=Confidence(1.0))), 1, 64)
    with torch.inference_mode():
        batch.begin(0, [1, 2, 3], 16, 0)
        monkeypatch.setattr(head, "read", None)  # a call would fail
        monkeypatch.setattr(type(batch.drafting), "advance", lambda *_: None)
        batch.round()
    assert batch.under_way[0].result.drafted == [0]


def test_only_chains_end_early_and_bad_settings_are_refused():
    with pytest.raises(UserError, match="expected a chain"):
        StaticTree(((0,), (1,)), stop=Confidence())
    with pytest.raises(UserError, match=r"confidence of 1\.5"):
        Confidence(1.5)
    with pytest.raises(UserError, match="expected gamma above 0"):
        EntropyBound(gamma=0)
    chain = StaticTree.chain(6, stop=Confidence())
    assert chain.truncate(2) == StaticTree.chain(2, stop=Confidence())
    assert str(chain) == "chain of 6, while 0.4 sure"
