"""Token recycling: what it is shown, what it keeps and drafts of that, and that its answers are the target's own."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, ForcedPath, StaticTree
from specdraft.drafters.token_recycling import RecyclingDrafting, TokenRecycling
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

V = 64
BUSH = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))
SHAPES = [StaticTree.chain(4), BUSH, DynamicTree(3, 3, 9)]
NO_FEATURES = Features(torch.empty(0), torch.empty(0))


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama())


def drafting_of(target, top_k, rows, last):
    drafter = TokenRecycling(top_k)
    drafter.bind(target)
    drafting = drafter.drafting(rows, 64)
    tokens = torch.tensor([[9, token] for token in last])
    drafting.advance(Texts(torch.ones(rows), 1), tokens, torch.full((rows,), 2), NO_FEATURES)
    return drafter, drafting


def drafted(drafting, shape, rows=1):
    trees = drafting.draft(Texts(torch.full((rows,), 3), 3), shape, Sampling(), None)
    alive = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))
    return [
        [(int(trees.tokens[row, node]), int(trees.parents[row, node])) for node in alive[row].nonzero()[:, 0]]
        for row in range(rows)
    ]


def test_a_tree_of_the_candidates_of_candidates(target):
    _, drafting = drafting_of(target, 3, 2, [1, 5])
    drafting.observe(torch.tensor([[1, 2, 3]]), torch.tensor([[[2, 3, 4], [7, 8, 9], [1, 0, 6]]]))
    bush = [(2, -1), (3, -1), (4, -1), (7, 0), (8, 0), (1, 1)]  # nothing is known of 7 and 8
    assert drafted(drafting, BUSH, 2) == [bush, []]  # nor of 5
    assert drafted(drafting, DynamicTree(3, 3, 9), 2) == drafted(drafting, StaticTree.chain(3), 2)
    assert drafted(drafting, StaticTree.chain(3), 2) == [[(2, -1), (7, 0)], []]
    _, narrow = drafting_of(target, 1, 1, [1])  # a tree of more children than there are candidates
    narrow.observe(torch.tensor([[1, 2]]), torch.tensor([[[2], [7]]]))
    assert drafted(narrow, BUSH) == [[(2, -1), (7, 0)]]


def test_the_newest_of_several_readings_counts_and_requests_share_them(target):
    drafter, drafting = drafting_of(target, 2, 2, [1, 1])
    tokens = torch.tensor([[1, 3, 1], [4, 1, 3]])
    best = torch.arange(12).view(2, 3, 2)
    drafting.observe(tokens, best)
    assert drafter.candidates[[1, 3, 4]].tolist() == [[8, 9], [10, 11], [6, 7]]
    assert int((drafter.candidates >= 0).sum()) == 6
    drafting.observe(tokens[:1, :2], best[:1, :2])
    assert drafter.candidates[[1, 3, 4]].tolist() == [[0, 1], [2, 3], [6, 7]]
    drafter.bind(target)  # again: nothing is lost
    assert drafted(drafting, StaticTree.chain(1), 2) == [[(0, -1)], [(0, -1)]]
    drafting.drop(0, 1, 3)
    drafter.forget()
    assert drafted(drafting, StaticTree.chain(1)) == [[]]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_answers_are_the_targets_own(target, shape, batch_size):
    prompts = random_prompts(8, [1, 2, 5, 9, 16])
    found = Decoder(target, TokenRecycling(), shape).generate_batch(prompts, 32, batch_size)
    assert [each.tokens for each in found] == transformers_greedy(target.model, prompts, 32)
    rates = sum(sum(each.accepted) for each in found) / sum(len(each.accepted) for each in found)
    assert rates > 0.3  # drafts are accepted


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@torch.inference_mode()
def test_it_is_shown_what_the_target_would_say_after_every_token_it_reads(target, shape, monkeypatch):
    """Of drafts that are rejected as well; what is no draft tells nothing new."""
    shown = []
    observe = RecyclingDrafting.observe

    def noted(drafting, tokens, best):
        shown.append((tokens, best))
        observe(drafting, tokens, best)

    monkeypatch.setattr(RecyclingDrafting, "observe", noted)
    monkeypatch.setattr("specdraft.decoding.requests._SHOWN", 3)  # positions of a prompt at a time
    prompt = [5, 6, 7, 5, 6, 9, 11]
    decoder = Decoder(target, TokenRecycling(3), shape, trace=True)
    result = decoder.generate(prompt, 24)

    def top(text):
        return target.model(torch.tensor([text])).logits[0].topk(3).indices

    assert [len(tokens[0]) for tokens, _ in shown[:3]] == [3, 3, 1]
    assert torch.cat([tokens for tokens, _ in shown[:3]], dim=1).tolist() == [prompt]
    assert torch.equal(torch.cat([best[0] for _, best in shown[:3]]), top(prompt))
    text = prompt + result.tokens[:1]
    for (tokens, best), accepted in zip(shown[3:], result.accepted, strict=True):
        assert tokens[0, 0] == text[-1] and torch.equal(best[0, 0], top(text)[-1])
        if shape.is_chain:  # dead places repeat the last emitted token
            drafts = tokens[0, 1:].tolist()
            live = next((n for n in range(len(drafts)) if torch.equal(best[0, 1 + n], best[0, 0])), len(drafts))
            assert torch.equal(best[0, 1 : 1 + live], top(text + drafts[:live])[len(text) :])
        text += (prompt + result.tokens)[len(text) : len(text) + accepted + 1]


def test_a_tree_cannot_be_measured_and_options_are_checked(target):
    _, drafting = drafting_of(target, 3, 1, [1])
    with pytest.raises(UserError, match="learns as it decodes: expected decoding/shape="):
        drafting.draft(Texts(torch.ones(1), 1), ForcedPath(torch.zeros(1, 2), 3), Sampling(), None)
    with pytest.raises(UserError, match="top_k=0: expected at least 1"):
        TokenRecycling(0)
    assert TokenRecycling(**TokenRecycling(5).config()).top_k == 5
