"""Logits scaled for sampled drafts: what is accepted in real decoding, and what stays as it was."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.evaluation.sharpening import best_sharpness, own_heads, scale_logits
from specdraft.targets import Target
from tests.fakes import tiny_llama

SIZES = {"num_hidden_layers": 4, "initializer_range": 0.3, "tie_word_embeddings": False}
PROMPTS = [[number, 3, number % 7, 5] for number in range(1, 11)]


def small_target(**options):
    return Target.from_model(tiny_llama(64, 256, **SIZES | options))


@pytest.fixture(scope="module")
def target():
    return small_target()


def decoded(target, drafter, sampling):
    return Decoder(target, drafter, 3, sampling).generate_batch(PROMPTS, 32, 10)


def share(generations):
    """Of the drafted tokens, how many were accepted."""
    return sum(sum(each.accepted) for each in generations) / sum(3 * len(each.accepted) for each in generations)


@pytest.mark.parametrize(("blur", "factor"), [(0.8, 1.25), (1.25, 0.8), (1.0, 1.0)])
def test_a_copy_of_the_target_becomes_itself_again(target, blur, factor):
    """Less or more sure than the target is: the one factor with which every sampled token is accepted is found."""
    draft = DraftModel.for_target(target, copy_layers=target.config.num_hidden_layers).requires_grad_(False)
    for head in own_heads(draft):
        head.weight.mul_(blur)
    before = share(decoded(target, draft, Sampling(1.0)))
    found = best_sharpness(draft, target, PROMPTS, 32, progress=False)
    assert share(decoded(target, draft, Sampling(1.0))) == before
    scale_logits(draft, found.factor)
    assert found.factor == factor and found.after == pytest.approx([1.0], abs=1e-5)
    assert found.tokens == sum(len(each.tokens) for each in decoded(target, None, Sampling(1.0)))
    assert share(decoded(target, draft, Sampling(1.0))) > 0.99
    assert blur == 1 or (found.before[0] < 0.97 and before < 0.97)


@pytest.mark.parametrize("kind", [Eagle3, Medusa])
def test_heads_draft_the_same_tokens_greedily_and_by_position_more_sampled_ones(target, kind):
    torch.manual_seed(0)
    drafter = kind.for_target(target, torch.arange(64)).requires_grad_(False)
    for head in own_heads(drafter):
        head.weight.mul_(2)  # too sure of what it does not know
    before = [each.accepted for each in decoded(target, drafter, Sampling())]
    found = best_sharpness(drafter, target, PROMPTS, 32)
    scale_logits(drafter, found.factor)
    assert found.factor == 0.8 and len(found.before) == len(found.after) > 1
    assert found.after[0] > found.before[0]
    assert [each.accepted for each in decoded(target, drafter, Sampling())] == before


def test_what_cannot_be_scaled(target):
    tied = DraftModel.for_target(small_target(tie_word_embeddings=True), copy_layers=1)
    for drafter in (Eagle.for_target(target), tied, PromptLookup()):
        with pytest.raises(UserError, match=f"logits of {drafter.family} cannot be scaled: expected a proj"):
            own_heads(drafter)
