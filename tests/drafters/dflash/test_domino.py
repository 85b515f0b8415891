"""Domino: its recurrence is torch's, its loss goes from the base to the corrected logits, and what it learns."""

import pytest
import torch
from torch import nn

from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.dflash import Domino
from specdraft.drafters.dflash.domino import Recurrence
from specdraft.errors import UserError
from tests.drafters.dflash.conftest import VOCABULARY, build


def domino(target, **options) -> Domino:
    drafter = build(target, kind=Domino, **{"gru_size": 7, "rank": 6} | options)
    assert isinstance(drafter, Domino)
    return drafter


def features_of(drafter, batch):
    return drafter.target.features(batch.input_ids, batch.position_ids, drafter.layers)


def test_the_recurrence_is_torchs_gru_read_at_once_or_token_by_token():
    torch.manual_seed(0)
    ours, theirs = Recurrence(5, 3).double(), nn.GRU(5, 3, bias=False, batch_first=True).double()
    theirs.weight_ih_l0.data, theirs.weight_hh_l0.data = ours.of_token.weight.data, ours.of_state.weight.data
    read, state = torch.randn(4, 6, 5).double(), torch.randn(4, 3).double()
    for before in (None, state):
        expected, _ = theirs(read, None if before is None else before[None])
        torch.testing.assert_close(ours(read, before), expected)
        each, found = before, []
        for token in read.split(1, dim=1):
            found.append(ours(token, each))
            each = found[-1][:, 0]
        torch.testing.assert_close(torch.cat(found, dim=1), expected)


def test_the_loss_goes_from_the_base_to_the_corrected_logits(target, packed):
    drafter = domino(target)
    features = features_of(drafter, packed)

    def loss(progress, training=True):
        drafter.train(training).progress = progress
        return drafter.training_loss(packed, features, target)

    base, final = loss(0.0).loss, loss(1.0).loss
    assert (base - final).abs() > 1e-3
    torch.testing.assert_close(loss(0.25).loss, 0.75 * base + 0.25 * final)
    assert loss(0.25, training=False).loss == final
    told = [loss(progress).metrics for progress in (0.25, 1.0)]  # what is drafted from, whatever is learned from
    assert told[0].keys() == told[1].keys() and all(torch.equal(told[0][name], told[1][name]) for name in told[0])
    with torch.no_grad():
        drafter.projection.weight.zero_()
    torch.testing.assert_close(loss(1.0).loss, base)  # an untrained correction adds nothing


def test_weights_by_confidence_are_those_of_the_corrected_logits_for_both(target, packed):
    drafter = domino(target, confidence_smoothing=0.5).train()
    features, found = features_of(drafter, packed), []
    for progress in (0.0, 0.5, 1.0):
        drafter.progress = progress
        found.append(drafter.training_loss(packed, features, target).loss)
    torch.testing.assert_close(found[1], (found[0] + found[2]) / 2)


def test_all_but_the_frozen_projection_learns(target, packed):
    drafter = domino(target).train()
    drafter.progress = 0.5
    drafter.training_loss(packed, features_of(drafter, packed), target).loss.backward()
    assert {name for name, each in drafter.named_parameters() if each.grad is None} == {"lm_head.weight"}
    assert all(each.grad.abs().sum() > 0 for each in drafter.parameters() if each.requires_grad)


def test_the_state_does_not_hang_on_how_long_embeddings_are(target):
    drafter, tokens = domino(target), torch.tensor([[3, 5, 96]])
    expected = drafter.read_prefix(tokens)
    longer = type("Longer", (), {"embedding_weight": 30 * target.embedding_weight})()
    drafter.bind(longer)
    torch.testing.assert_close(drafter.read_prefix(tokens), expected, rtol=1e-3, atol=1e-3)
    drafter.bind(target)


def test_a_checkpoint_is_read_back(target, tmp_path):
    drafter = domino(target).float()
    loaded, _ = load_drafter(save_drafter(drafter, tmp_path / "drafter", target.identity))
    assert isinstance(loaded, Domino) and loaded.config() == drafter.config()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 1}, "block_size is 1: expected at least 2"),
        ({"gru_size": 0}, "gru_size is 0: expected at least 1"),
        ({"rank": 0}, "rank is 0: expected at least 1"),
    ],
)
def test_what_cannot_be_is_refused(target, options, said):
    with pytest.raises(UserError, match=said):
        Domino.for_target(target, VOCABULARY, **options)
