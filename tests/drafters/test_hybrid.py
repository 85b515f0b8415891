"""A look-up where it finds enough, else a head: which of the two drafts, and that answers are the target's own."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.hybrid import Hybrid, choose
from specdraft.drafters.lookahead import Lookahead
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.suffix import Suffix
from specdraft.drafters.token_recycling import TokenRecycling
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.decoding.trees import tree_of
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

V = 64
BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama())


@pytest.fixture(scope="module")
def head(target):
    return Medusa.for_target(target, num_heads=3)


def test_each_request_has_the_tree_of_one_of_the_two():
    q = torch.rand(2, 3, V)
    one = DraftTrees.chains(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.rand(2, 4, V))
    bush = tree_of([1, 2, 3], [-1, -1, 0])
    bush = DraftTrees(*(part.expand(2, -1) for part in (bush.tokens, bush.parents)), q, depth=2, width=2)
    for first, second, turned in ((one, bush, False), (bush, one, True)):
        found = choose(torch.tensor([True, False]) ^ turned, first, second)
        assert found.tokens.tolist() == [[1, 2, 3, 4], [1, 2, 3, 0]]
        assert found.parents.tolist() == [[-1, 0, 1, 2], [-1, -1, 0, 2]]
        assert found.alive.tolist() == [[True] * 4, [True, True, True, False]]
        assert torch.equal(found.q[0], one.q[0]) and torch.equal(found.q[1, :3], q[1])
        assert (found.depth, found.width) == (4, 2)
    chain = DraftTrees.chains(torch.tensor([[9], [9]]))
    short = choose(torch.tensor([False, True]), DraftTrees.chains(torch.tensor([[1, 2], [3, 4]])), chain)
    assert short.is_chain and short.q is None and short.alive.tolist() == [[True, False], [True, True]]


class Told(PromptLookup):
    """Finds what it is told to find."""

    def propose(self, state, length, after=()):
        return self.finds[state.tokens[0]][:length]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_the_head_is_asked_only_where_too_little_was_found(target, head, sampling, monkeypatch):
    asked = []
    kind = type(head.drafting(1, 1))
    draft = kind.draft
    monkeypatch.setattr(kind, "draft", lambda *arguments: asked.append(1) or draft(*arguments))
    told = Told()
    for finds, times in (([9, 8], [7]), 1), (([9, 8], [7, 6, 5]), 0), (([], []), 1):
        told.finds = finds
        batch = Requests(Decoder(target, Hybrid(head, told), 3, sampling, trace=True), 2, 40)
        for number in range(2):
            batch.begin(number, [number, 3], 8, number)
        asked.clear()
        batch.round()
        assert len(asked) == times
        for request, found in zip(batch.under_way, finds, strict=True):
            tokens = request.result.trace.rounds[0].drafted
            assert tokens == found if len(found) > 1 else len(tokens) == 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [3, BUSH, DynamicTree(3, 2, 6)], ids=str)
def test_answers_do_not_depend_on_what_is_decoded_beside(target, head, shape, sampling):
    prompts = [[5, 6, 7, 5, 6], [9, 9, 9], *random_prompts(6, [1, 4, 9])]
    decoder = Decoder(target, Hybrid(head, PromptLookup(), 2), shape, sampling)
    together = decoder.generate_batch(prompts, 24, 3)
    alone = [decoder.generate(prompt, 24, number) for number, prompt in enumerate(prompts)]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [each.accepted for each in together] == [each.accepted for each in alone]
    if sampling.greedy:
        assert [each.tokens for each in together] == transformers_greedy(target.model, prompts, 24)


def test_tokens_of_the_head_ride_along_whichever_of_the_two_drafts(target):
    prompts = [[5, 6, 7, 5, 6], *random_prompts(3, [1, 4, 9])]
    found = Decoder(target, Hybrid(Lookahead(9, 8, 9), PromptLookup(), 2), 8).generate_batch(prompts, 32, 3)
    assert [each.tokens for each in found] == transformers_greedy(target.model, prompts, 32)


def test_both_are_told_to_forget_and_share_the_target(target, head):
    suffix = Suffix()
    hybrid = Hybrid(head, suffix)
    Decoder(target, hybrid, 3).generate([1, 2, 3], 6)
    assert suffix.kept and hybrid.layers == head.layers and hybrid.family == "hybrid"
    hybrid.forget()
    assert not suffix.kept


def test_bad_parts(head):
    with pytest.raises(UserError, match="retrieval is token_recycling: expected one that looks at the text alone"):
        Hybrid(head, TokenRecycling())
    with pytest.raises(UserError, match="min_tokens is 0: expected at least 1"):
        Hybrid(head, PromptLookup(), 0)
