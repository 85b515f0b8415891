"""Drafts in an engine that tells nothing but tokens are those of our decoder, whatever it does with its rows."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.pacing import Goodput, Rounds
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.ngram_cache import NgramCache
from specdraft.drafters.pard import Pard
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.suffix import Suffix
from specdraft.serving.follower import Follower
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama
from tests.serving.engine import Request, serve

LIMIT, K, NEW = 96, 4, 24
CHAIN = StaticTree.chain(K, sampled=False)
SURE = StaticTree.chain(K, sampled=False, stop=Confidence(0.3))
TEXT = {"suffix": Suffix, "prompt_lookup": PromptLookup, "ngram_cache": NgramCache}


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama(context=LIMIT))


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(6, [5, 9, 3, 12])


@pytest.fixture(scope="module")
def continuations(target, prompts):
    return [Decoder(target).generate(prompt, NEW + K + 1).tokens for prompt in prompts]


def drafters(target):
    """Of every kind a new one, and its shape; the first remember earlier requests."""
    draft = DraftModel.for_target(target, copy_layers=[0]).eval()
    found = {name: (kind(), CHAIN) for name, kind in TEXT.items()}
    found["suffix, else ngram_cache"] = Hybrid(NgramCache(), Suffix()), CHAIN
    found["draft, while it is sure"] = draft, SURE
    found["draft, as long as pays"] = draft, StaticTree.chain(K, sampled=False, stop=Goodput((0.3, 0.2)))
    found["pard"] = Pard.for_target(target, copy_layers=[0], mask_token=0, num_drafts=3).eval(), CHAIN
    found["suffix of the request, else draft"] = Hybrid(draft, Suffix(max_cached_requests=0)), SURE
    return found


NAMES = [*TEXT, "suffix, else ngram_cache", "draft, while it is sure", "pard", "suffix of the request, else draft"]
FORGETFUL = ["prompt_lookup", *NAMES[4:]]
PACED = "draft, as long as pays"


def decoded(target, drafter, shape, prompts):
    generations = [Decoder(target, drafter, shape).generate(prompt, NEW) for prompt in prompts]
    drafter.forget()
    return [(each.drafted, each.accepted) for each in generations]


def served(drafter, shape, prompts, continuations, rows=1, limit=LIMIT, **how):
    follower = Follower(drafter, shape, rows, limit, torch.device("cpu"))
    requests = [Request(*both, NEW) for both in zip(prompts, continuations, strict=True)]

    def propose(sampled, lengths, ids):
        texts = [ids[row, : lengths[row]] for row in range(len(sampled))]
        return follower.drafts(texts, [len(each) for each in sampled])

    serve(propose, requests, rows, **how)
    assert len(follower.texts) <= rows
    return [(each.drafted, each.accepted) for each in requests]


@pytest.mark.parametrize("name", [*NAMES, PACED])
def test_one_after_the_other_in_their_order(target, prompts, continuations, name):
    drafter, shape = drafters(target)[name]
    ours = decoded(target, drafter, shape, prompts)
    assert sum(sum(accepted) for _, accepted in ours) > 5
    assert len({length for drafted, _ in ours for length in drafted}) > (name != "pard")  # of several lengths
    assert served(drafter, shape, prompts, continuations) == ours


@pytest.mark.parametrize("name", FORGETFUL)
def test_side_by_side_in_rows_that_move(target, prompts, continuations, name):
    drafter, shape = drafters(target)[name]
    ours = decoded(target, drafter, shape, prompts)
    assert served(drafter, shape, prompts, continuations, rows=3, part=4, swaps=True) == ours


def test_side_by_side_all_draft_equally_many_tokens_by_what_was_accepted_of_each(target, prompts, continuations):
    drafter, shape = drafters(target)[PACED]
    follower = Follower(drafter, shape, len(prompts), LIMIT, torch.device("cpu"))
    requests = [Request(*both, NEW) for both in zip(prompts, continuations, strict=True)]
    lengths = []

    def propose(sampled, sizes, ids):
        drafts = follower.drafts([ids[row, : sizes[row]] for row in range(len(sampled))], [len(e) for e in sampled])
        lengths.append({len(draft) for draft, emitted in zip(drafts, sampled, strict=True) if emitted})
        for text, rounds in zip(follower.texts, follower.rounds, strict=True):
            (request,) = (each for each in requests if each.text == text.tolist())
            told = Rounds(zip(request.drafted, request.accepted, strict=True))
            assert rounds.counts(K) == told.counts(K)  # besides these it knows how sure drafts were
        return drafts

    serve(propose, requests, len(prompts), swaps=True)
    assert all(len(each) <= 1 for each in lengths) and len(set.union(*lengths)) > 2


def test_a_request_is_known_by_its_text_and_not_by_its_row(prompts, continuations, monkeypatch):
    expected = served(PromptLookup(), CHAIN, prompts, continuations, rows=3, swaps=True)

    def by_row(self, texts, emitted):
        return [row if row < len(texts) else None for row in range(len(self.texts))]

    monkeypatch.setattr(Follower, "_found_again", by_row)
    assert served(PromptLookup(), CHAIN, prompts, continuations, rows=3, swaps=True) != expected


def test_the_order_of_requests_matters_to_what_remembers_them(target, prompts, continuations):
    repeated = prompts[:2] * 2, continuations[:2] * 2
    again = served(Suffix(), CHAIN, *repeated)
    assert sum(again[2][1]) > sum(again[0][1])  # it has seen the answer
    assert served(Suffix(), CHAIN, *repeated) == decoded(target, Suffix(), CHAIN, repeated[0])
    beside = served(Suffix(), CHAIN, *repeated, rows=4)
    assert beside != again  # each has seen but a part of the others


def test_a_request_that_was_away_goes_on(target, prompts, continuations):
    away = {3, 4, 9}
    found = served(PromptLookup(), CHAIN, prompts, continuations, rows=2, away=away.__contains__)
    alone = served(PromptLookup(), CHAIN, prompts, continuations)
    assert [sum(accepted) + len(accepted) for _, accepted in found] >= [NEW - 1] * len(prompts)
    assert found[2:] == alone[2:]


def test_equal_texts_side_by_side(prompts, continuations):
    twice = [prompts[0]] * 3, [continuations[0]] * 3
    assert len({str(each) for each in served(PromptLookup(), CHAIN, *twice, rows=3)}) == 1


def test_no_draft_runs_past_the_context():
    text = torch.tensor([6, 7, 8, 9] * 10).int().numpy()
    follower = Follower(PromptLookup(), CHAIN, 2, 42, torch.device("cpu"))
    assert follower.drafts([text[:40], text[:36]], [1, 1]) == [[6, 7], [6, 7, 8, 9]]
    follower = Follower(PromptLookup(), CHAIN, 1, 40, torch.device("cpu"))
    assert follower.drafts([text], [1]) == [[]]


def test_nothing_is_drafted_while_a_prompt_is_read():
    follower = Follower(PromptLookup(), CHAIN, 2, 40, torch.device("cpu"))
    text = torch.tensor([6, 7, 8, 9] * 3).int().numpy()
    assert follower.drafts([text], [0]) == [[]] and follower.texts == []
    assert follower.drafts([], []) == []
    assert follower.drafts([text, text[:8]], [0, 1]) == [[], [6, 7, 8, 9]]
