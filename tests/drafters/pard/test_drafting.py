"""One pass a draft, whatever its shape, and the target's own words."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.pard import Pard
from tests.drafters.alone import Alone
from tests.drafters.drafts import CLOSE, PROMPT
from tests.fakes import random_prompts, transformers_greedy

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)))
SHAPES = [StaticTree.chain(4), TREE, DynamicTree(4, 3, 12)]


@pytest.fixture
def draft(build):
    return build()


@pytest.fixture
def passes(draft, monkeypatch):
    """Tokens of each pass."""
    found, step = [], draft.language_model.step
    monkeypatch.setattr(draft.language_model, "step", lambda *given: found.append(given[0].ids.shape) or step(*given))
    return found


def begun(draft):
    state = Alone(draft, PROMPT[0])
    state.advance(torch.tensor(PROMPT[1:]))
    return state


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_draft_costs_one_pass(draft, shape, passes):
    state = begun(draft)
    assert passes == [(1, len(PROMPT) - 1)]
    state.draft(shape)
    state.advance(torch.tensor([3, 4, 5]))
    tree = state.draft(shape)
    assert passes[1:] == [(1, shape.depth), (1, 2 + shape.depth)] and tree.num_nodes == shape.num_nodes


def test_what_no_draft_was_made_of_is_read_all_the_same(draft, passes):
    state, other = begun(draft), begun(draft)
    state.advance(torch.tensor([3, 4, 5]))
    state.advance(torch.tensor([6, 7]))
    other.advance(torch.tensor([3, 4, 5, 6, 7]))
    torch.testing.assert_close(state.along([1, 2]), other.along([1, 2]), **CLOSE)


def test_a_draft_ends_with_what_was_trained_and_leaves_the_state_as_it_was(draft):
    state = begun(draft)
    one, again = state.draft(StaticTree.chain(9)), state.draft(StaticTree.chain(9))
    assert one.num_nodes == 4 and torch.equal(one.tokens, again.tokens)
    assert torch.equal(state.draft(StaticTree.chain(2)).tokens, one.tokens[:, :2])  # masks look back alone


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_the_cached_path_is_the_whole_text_read_at_once(family, build):
    draft = build(family)
    state, text = begun(draft), list(PROMPT)
    for told in ([3, 4, 5], [6], [7, 8, 9, 1]):
        state.draft(StaticTree.chain(4))
        state.advance(torch.tensor(told))
        text += told
    ids = torch.tensor([[*text, 5, 5, 5]])
    plain = draft.model(ids, use_cache=False).logits[0, -4:]
    torch.testing.assert_close(state.along([0, 0, 0]), plain, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_decoding_says_what_the_target_says(target, shape):
    draft = Pard.for_target(target, copy_layers=6, mask_token=5, num_drafts=4)  # right at the first place, always
    prompts = random_prompts(5, [3, 9, 17], 97)
    expected = transformers_greedy(target.model, prompts, 24)
    for batch in (1, 3):
        found = Decoder(target, draft, shape, Sampling()).generate_batch(prompts, 24, batch)
        assert [each.tokens for each in found] == expected
        accepted = [count for each in found for count in each.accepted]
        assert min(accepted) == 1 and len(accepted) < sum(accepted) < 4 * len(accepted)


def test_sampled_drafts_tell_their_distribution(draft):
    state, sampling = begun(draft), Sampling(0.8, top_k=9)
    tree = state.draft(StaticTree.chain(4, sampled=True), sampling, seed=3)
    read = torch.stack([state.read[0][1], *(logits[:, 0] for _, logits in state.read[1:])], 1)
    torch.testing.assert_close(tree.q[0], sampling.probabilities(read)[0])
