"""P-EAGLE's drafts: two passes whatever their length, and the target's own words."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.eagle import PEagle
from tests.drafters.eagle.variants import begun
from tests.fakes import random_prompts, transformers_greedy

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)))
SHAPES = [StaticTree.chain(4), TREE, DynamicTree(4, 3, 12)]


@pytest.fixture
def head(target):
    torch.manual_seed(0)
    head = PEagle.for_target(target, torch.arange(3, 97, 2), ttt_steps=4, num_layers=2).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_are_read_in_one_pass(head, packed, shape, monkeypatch):
    state, passes = begun(head, packed), []
    read = head.read
    monkeypatch.setattr(head, "read", lambda *given: passes.append(len(given[0])) or read(*given))
    tree = state.draft(shape)
    assert passes == [shape.depth - 1] and tree.num_nodes == shape.num_nodes  # the emitted token's pass was before
    passes.clear()
    state.draft(StaticTree.chain(1))
    assert passes == []


def test_a_draft_ends_with_what_was_trained(head, packed):
    state = begun(head, packed)
    assert state.draft(StaticTree.chain(9)).num_nodes == 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_decoding_says_what_the_target_says(head, target, shape):
    prompts = random_prompts(5, [3, 9, 17], 97)
    expected = transformers_greedy(target.model, prompts, 24)
    for batch in (1, 3):
        decoder = Decoder(target, head, shape, Sampling())
        assert [each.tokens for each in decoder.generate_batch(prompts, 24, batch)] == expected


def test_a_shorter_draft_says_the_same(head, packed):
    """Masks look back alone, so that an engine may draft less than was trained."""
    state = begun(head, packed)
    long, short = state.draft(StaticTree.chain(4)), state.draft(StaticTree.chain(2))
    assert torch.equal(long.tokens[:, :2], short.tokens)
