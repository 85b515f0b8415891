"""What Medusa and Hydra share: as many levels as heads, each with a projection of its own."""

import pytest
import torch

from specdraft.decoding.shapes import StaticTree
from specdraft.drafters import last_state
from specdraft.drafters.alignment import align
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from tests.drafters.test_last_state import STEPS, VOCABULARY, drafter_for, features_of, state_after

both = pytest.mark.parametrize("kind", [Medusa, Hydra])


def test_what_a_configuration_leaves_out():
    alone = Medusa(hidden_size=8, vocab_size=20, draft_vocab_size=20)
    assert len(alone.blocks) == 5 and [len(block.layers) for block in alone.blocks] == [1] * 5
    assert last_state.ResidualBlock(8, 1).layers[0].in_features == 8
    assert not Medusa.reads_every_last


@both
def test_a_draft_leaves_the_state_as_it_was_and_ends_with_the_last_head(kind, target, packed):
    drafter = drafter_for(kind, target)
    state = state_after(drafter, packed)
    last, token = state.drafting.last.clone(), state.drafting.token.clone()
    tree, again = state.draft(StaticTree.chain(9)), state.draft(StaticTree.chain(9))
    assert tree.is_chain and tree.num_nodes == STEPS and tree.q is None
    assert torch.equal(tree.tokens, again.tokens) and drafter.t2d[tree.tokens].all()
    assert torch.equal(state.drafting.last, last) and torch.equal(state.drafting.token, token)


@both
def test_cross_entropy_reads_the_texts_own_tokens(kind, target, packed):
    """Only head 0, at its supervised rows: minus the log probability of token r+2 where it can be drafted."""
    drafter = drafter_for(kind, target, steps=1, divergence="cross_entropy")
    features = features_of(target, packed)
    result = drafter.training_loss(packed, features, target)
    aligned = align(packed, 1)
    rows = aligned.supervised[0]
    hidden = drafter.hidden(0, features.last.flatten(0, 1)[rows], aligned.tokens[rows + 1][:, None])
    log_q = drafter.lm_heads[0](hidden).log_softmax(-1)
    index = torch.full((97,), -1)
    index[VOCABULARY] = torch.arange(len(VOCABULARY))
    label = index[aligned.tokens[rows + 2]]
    known = label >= 0
    assert 0 < known.sum() < len(rows)
    expected = -log_q[known].gather(1, label[known, None]).sum() / len(rows)
    torch.testing.assert_close(result.loss, expected, rtol=1e-9, atol=1e-9)


@both
@pytest.mark.parametrize("option", ["num_heads", "num_layers"])
def test_no_heads_or_layers_are_refused(kind, option, target):
    with pytest.raises(UserError, match=f"{option} is 0: expected at least 1"):
        kind.for_target(target, **{option: 0})


@both
def test_flops_are_of_each_heads_share(kind, target):
    block = [(kind.num_read(head) + 1) * target.hidden_size**2 for head in range(2)]  # two layers
    projection = len(VOCABULARY) * target.hidden_size
    for sampled, share in ((False, 1.0), (True, 0.5)):
        drafter = drafter_for(kind, target, steps=2, decay=0.5, num_layers=2, sample_positions=sampled)
        matrices = block[0] + projection + share * (block[1] + projection)
        assert drafter.training_flops(64) == (2 * matrices, 4 * matrices)


@both
@pytest.mark.parametrize("answer", [0, 2, 3], ids=lambda tokens: f"{tokens} tokens to learn")
def test_a_head_is_trained_where_the_answer_reaches_it(kind, answer, target, packed):
    drafter = drafter_for(kind, target, noise=0.0)
    packed.loss_mask.zero_()
    packed.loss_mask[0, 3 : 3 + answer] = True
    drafter.training_loss(packed, features_of(target, packed), target).loss.backward()
    trained = [block.layers[0].weight.grad.abs().sum() > 0 for block in drafter.blocks]
    assert trained == [answer >= 2 + head for head in range(STEPS)]
