"""Several drafters for one text: each drafts as it would alone, and answers are the target's own."""

import pytest
import torch

from specdraft.decoding.block_verification import block_verification
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, ForcedPath, StaticTree
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.early_exit import EarlyExit
from specdraft.drafters.ensemble import Ensemble, of_layers
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.jacobi import Jacobi
from specdraft.drafters.lookahead import Lookahead
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.quantization import quantize
from specdraft.drafters.suffix import Suffix
from specdraft.drafters.token_recycling import TokenRecycling
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from tests.drafters.conversations import Conversations
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES

BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
GREEDY, SAMPLED = Sampling(), Sampling(1.0)
WAYS = [(StaticTree.chain(3), GREEDY), (StaticTree.chain(3), SAMPLED), (BUSH, SAMPLED), (DynamicTree(3, 2, 6), GREEDY)]


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama(num_hidden_layers=4))


@pytest.fixture(scope="module")
def heads(target):
    """Two of which each reads layers of its own, and one that reads none."""
    torch.manual_seed(0)
    return [
        Eagle3.for_target(target, torch.arange(0, 64, 2), layers=(1, 3)),
        Medusa.for_target(target, num_heads=2),
        Eagle3.for_target(target, None, layers=(2, 3)),
    ]


def test_each_is_given_the_states_of_its_own_layers():
    parts = {layer: torch.full((2, 5, 4), float(layer)) for layer in (1, 2, 7)}
    features = Features(torch.cat(list(parts.values()), dim=-1), torch.zeros(2, 5, 4))
    for own in ((), (2,), (1, 7), (1, 2, 7)):
        found = of_layers(features, (1, 2, 7), own)
        assert found.aux.shape == (2, 5, 4 * len(own)) and found.last is features.last
        assert found.aux.unflatten(-1, (len(own), 4))[0, 0, :, 0].tolist() == list(own)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_k=7)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_members_draft_and_keep_what_they_would_alone(sampling):
    """Also beside other requests, when one ends, another takes its row, and a new one begins."""
    target = Target.from_model(FAMILIES["llama"].build())
    torch.manual_seed(0)
    members = [
        Eagle3.for_target(target, None, layers=(1, 3)).double(),
        DraftModel.for_target(target, copy_layers=1).double(),
        Eagle3.for_target(target, None, layers=(2,)).double(),
        PromptLookup(),
    ]
    ensemble = Ensemble(members)
    ensemble.bind(target)
    assert ensemble.layers == (1, 2, 3)
    together, apart = Conversations(ensemble, [0, 1, 2]), [Conversations(member, [0, 1, 2]) for member in members]
    alone = {number: Conversations(ensemble, [number]) for number in range(4)}
    for counts in ({0: 1, 1: 4, 2: 2, 3: 0}, {1: 1, 2: 3, 3: 2}):
        found = together.draft(BUSH, sampling)
        for number, (tokens, parents, q) in found.items():
            one = alone[number].draft(BUSH, sampling)[number]
            assert torch.equal(tokens, one[0]) and torch.equal(parents, one[1])
            assert sampling.greedy or torch.allclose(q, one[2])
        for member in apart if sampling.greedy else ():  # sampled, each draws with chance of its own
            for number, (tokens, parents, _) in member.draft(BUSH, sampling).items():
                assert paths(tokens, parents) <= paths(*found[number][:2])
        for each in (together, *apart):
            each.emit(counts)
            if 0 in each.numbers:
                each.drop(0)
                each.begin(3)
        for number in set(counts) - {0, 3}:
            alone[number].emit(counts)
    assert set(together.draft(BUSH, sampling)) == {1, 2, 3}


def paths(tokens, parents) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.mark.parametrize(("shape", "sampling"), WAYS, ids=str)
def test_answers_do_not_depend_on_what_is_decoded_beside(target, heads, shape, sampling):
    prompts = [[5, 6, 7, 5, 6], *random_prompts(3, [1, 4, 9])]
    ensemble = Ensemble([heads[0], EarlyExit(skip_layers=[1]), PromptLookup(), heads[1]])
    decoder = Decoder(target, ensemble, shape, sampling)
    together = decoder.generate_batch(prompts, 14, 2)
    alone = [decoder.generate(prompt, 14, number) for number, prompt in enumerate(prompts)]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [each.accepted for each in together] == [each.accepted for each in alone]
    assert sum(sum(each.accepted) for each in alone) > 5
    if sampling.greedy:
        assert [each.tokens for each in together] == transformers_greedy(target.model, prompts, 14)


def test_to_the_end_of_the_context_with_more_nodes_than_it_has_room_for(heads):
    """As many places are there as all members together may fill."""
    target = Target.from_model(tiny_llama(context=128, num_hidden_layers=4))
    prompts = random_prompts(2, [122, 60])
    ensemble = Ensemble([EarlyExit(), TokenRecycling(4), *heads])
    shape = DynamicTree(6, 4, 24)
    assert ensemble.num_places(shape) == 5 * 24
    found = Decoder(target, ensemble, shape).generate_batch(prompts, 8, 2)
    assert [len(each.tokens) for each in found] == [6, 8]
    expected = [transformers_greedy(target.model, [p], n)[0] for p, n in zip(prompts, (6, 8), strict=True)]
    assert [each.tokens for each in found] == expected


@torch.inference_mode()
def test_what_the_target_had_in_mind_is_shown_to_those_that_ask(target, heads, monkeypatch):
    wide, narrow = TokenRecycling(8), TokenRecycling(2)
    ensemble = Ensemble([heads[1], wide, narrow, EarlyExit()])
    batch = Requests(Decoder(target, ensemble, 3), 1, 40)
    assert batch.drafting.top_tokens == 8 and batch.drafting.shares_cache
    batch.begin(0, [4, 9, 4], 20, 0)
    batch.round()
    for drafter in (wide, narrow):
        assert (drafter.candidates[[4, 9]] >= 0).all()
    assert torch.equal(wide.candidates[:, :2], narrow.candidates)
    quiet = Requests(Decoder(target, Ensemble(heads[:2]), 3), 1, 40)
    assert quiet.drafting.top_tokens == 0 and not quiet.drafting.shares_cache


def test_what_all_members_have_in_common(target, heads):
    suffix = Suffix()
    ensemble = Ensemble([heads[0], suffix])
    Decoder(target, ensemble, 3).generate([1, 2, 3], 6)
    assert suffix.kept and ensemble.family == "ensemble" and ensemble.draws and not ensemble.rates_hold
    ensemble.forget()
    assert not suffix.kept
    assert not Ensemble([suffix, PromptLookup()]).draws and Ensemble([suffix, EarlyExit()]).draws
    quantized = DraftModel.for_target(target, copy_layers=1)
    quantize(quantized, "int8")
    assert Ensemble([quantized, suffix]).quantization == "int8" and Ensemble(heads).quantization is None
    assert Ensemble([heads[0], quantized]).quantization == "None and int8"


def test_an_ensemble_behind_a_look_up(target, heads):
    prompts = [[5, 6, 7, 5, 6], *random_prompts(3, [4, 9])]
    hybrid = Hybrid(Ensemble(heads[:2]), PromptLookup(), 2)
    assert hybrid.branches and hybrid.num_places(BUSH) == 12
    found = Decoder(target, hybrid, BUSH).generate_batch(prompts, 20, 2)
    assert [each.tokens for each in found] == transformers_greedy(target.model, prompts, 20)


def test_bad_members(target, heads):
    with pytest.raises(UserError, match="an ensemble with 1 drafter: expected at least 2"):
        Ensemble(heads[:1])
    with pytest.raises(UserError, match="jacobi cannot draft in an ensemble"):
        Ensemble([heads[0], Jacobi()])
    with pytest.raises(UserError, match="lookahead cannot draft in an ensemble"):
        Ensemble([heads[0], Lookahead()])
    other = Medusa.for_target(Target.from_model(tiny_llama(32)), num_heads=2)
    with pytest.raises(UserError, match=r"medusa drafts from a vocabulary of 32 tokens in an ensemble: expected .* 64"):
        Decoder(target, Ensemble([heads[0], other]), 3).generate([1, 2], 4)
    with pytest.raises(UserError, match="rule=block cannot verify an ensemble"):
        Decoder(target, Ensemble(heads), 3, Sampling(1.0), block_verification)
    drafting = Requests(Decoder(target, Ensemble(heads), 3), 1, 20).drafting
    with pytest.raises(UserError, match="a tree cannot be measured for an ensemble"):
        drafting.draft(None, ForcedPath(torch.zeros(1, 2), 3), Sampling(), None)
