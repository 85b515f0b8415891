"""Drafts come from one pass, whatever their shape, and are lossless."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.targets import Features
from tests.drafters.alone import Alone
from tests.drafters.dflash.conftest import build
from tests.fakes import random_prompts, transformers_greedy

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)))


def state_after(drafter, batch, length=9):
    ids = batch.input_ids[:1, : length + 1]
    features = drafter.target.features(ids[:, :-1], batch.position_ids[:1, :length], drafter.layers)
    state = Alone(drafter, int(ids[0, 0]))
    state.advance(ids[0, 1:], Features(*features))
    return state


@pytest.mark.parametrize("shape", [StaticTree.chain(4), TREE, DynamicTree(4, 3, 12)], ids=str)
def test_a_draft_costs_one_pass(drafter, packed, shape, monkeypatch):
    state, passes = state_after(drafter, packed), []
    read = drafter.read
    monkeypatch.setattr(drafter, "read", lambda *given: passes.append(len(given[0])) or read(*given))
    tree = state.draft(shape)
    assert passes == [1 + shape.depth] and tree.num_nodes == shape.num_nodes


def test_a_draft_ends_with_the_block_and_leaves_the_state_as_it_was(drafter, packed):
    state = state_after(drafter, packed)
    one, again = state.draft(StaticTree.chain(9)), state.draft(StaticTree.chain(9))
    assert one.is_chain and one.num_nodes == drafter.num_drafts == 4
    assert torch.equal(one.tokens, again.tokens) and drafter.t2d[one.tokens].all()


def test_shorter_blocks_have_fewer_masks(drafter, packed):
    """As engines run them: a slot of a block of two need not say what it says among five, unless it looks back only."""
    state = state_after(drafter, packed)
    long, short = state.draft(StaticTree.chain(4)), state.draft(StaticTree.chain(1))
    logits = []
    for shape in (StaticTree.chain(4), StaticTree.chain(1)):
        state.draft(shape)
        logits.append(state.read[0][1])
    same = torch.allclose(*logits, rtol=1e-9, atol=1e-9)
    assert same is drafter.causal and long.num_nodes == 4 and short.num_nodes == 1


@pytest.mark.parametrize("shape", [StaticTree.chain(4), TREE, DynamicTree(4, 3, 12)], ids=str)
def test_greedy_decoding_says_what_the_target_says(drafter, shape):
    drafter.bind(drafter.target)
    prompts = random_prompts(5, [3, 9, 17], 97)
    expected = transformers_greedy(drafter.target.model, prompts, 24)
    decoder = Decoder(drafter.target, drafter, shape, Sampling())
    for batch in (1, 3):
        found = [each.tokens for each in decoder.generate_batch(prompts, 24, batch)]
        assert found == expected


def test_sampled_drafts_tell_their_distribution(target, packed):
    drafter = build(target)
    state = state_after(drafter, packed)
    sampling = Sampling(0.8, top_k=9)
    tree = state.draft(StaticTree.chain(4, sampled=True), sampling, seed=3)
    expected = sampling.probabilities(
        torch.stack([state.read[0][1], *(logits[:, 0] for _, logits in state.read[1:])], 1)
    )
    torch.testing.assert_close(tree.q[0], drafter.vocabulary.scatter_to_target(expected)[0])
