"""What an earlier drafter gets right is left out of the loss, and nothing else."""

from dataclasses import replace

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle3
from specdraft.drafters.jacobi_forcing import JacobiForcing
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.training.boosting import Earlier, check_earlier
from specdraft.training.module import DrafterModule
from specdraft.training.schedule import OptimizerSettings
from tests.fakes import tiny_llama
from tests.training.ranks_worker import FAMILIES, make_model, make_rows

LENGTH, PROMPT = 40, 6


@pytest.fixture
def target() -> Target:
    return Target.from_model(tiny_llama(num_hidden_layers=6))


@pytest.fixture
def batch(target) -> Batch:
    """Two texts of the target's own, so that decoding a part of one goes on as it does."""
    rows = []
    for first in (5, 9):
        prompt = list(range(first, first + PROMPT))
        rows.append(prompt + Decoder(target).generate(prompt, LENGTH - PROMPT).tokens)
    positions = torch.arange(LENGTH).expand(2, -1)
    return Batch(torch.tensor(rows), positions, torch.zeros_like(positions), positions >= PROMPT)


@pytest.fixture
def head(target) -> Eagle3:
    torch.manual_seed(0)
    return Eagle3.for_target(target, None, ttt_steps=2)


def near(head: Eagle3) -> Eagle3:
    """Nobody trained it, but it is right now and then."""
    with torch.no_grad():
        head.fc.weight.copy_(torch.eye(head.fc.out_features).repeat(1, 3))
    return head


def saved(drafter, target, tmp_path) -> str:
    return str(save_drafter(drafter, tmp_path / drafter.family, target.identity, {}))


KINDS = {
    "eagle3": lambda target: near(Eagle3.for_target(target, None, ttt_steps=2)),
    "medusa": lambda target: Medusa.for_target(target, None, num_heads=2),
    "draft_model": lambda target: DraftModel.for_target(target, copy_layers=5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_are_the_tokens_that_it_drafts_wrong(target, batch, head, tmp_path, kind):
    torch.manual_seed(1)
    earlier = Earlier.of(saved(KINDS[kind](target), target, tmp_path), head, target)
    found = earlier.missed(batch, batch.features(target, head.layers), target)
    decoder = Decoder(target, earlier.drafters[0], 1)
    right = 0
    for row, ids in enumerate(batch.input_ids.tolist()):
        for place in range(PROMPT + 1, LENGTH):
            hit = decoder.generate(ids[: place - 1], 3).accepted[0] == 1  # the token at ``place``, after the one before
            assert bool(found.loss_mask[row, place]) != hit, (row, place)
            right += hit
    assert 0 < right < 2 * (LENGTH - PROMPT - 1)
    others = torch.arange(LENGTH).expand(2, -1) < PROMPT
    assert not found.loss_mask[others].any()
    assert torch.equal(replace(found, loss_mask=batch.loss_mask).input_ids, batch.input_ids)


def test_several_leave_what_all_of_them_miss(target, batch, head, tmp_path):
    names = [saved(KINDS[kind](target), target, tmp_path) for kind in ("eagle3", "draft_model")]
    features = batch.features(target, head.layers)
    one, other, both = (Earlier.of(each, head, target).missed(batch, features, target) for each in (*names, names))
    assert torch.equal(both.loss_mask, one.loss_mask & other.loss_mask)
    assert both.loss_mask.sum() < min(one.loss_mask.sum(), other.loss_mask.sum())


def test_training_learns_what_is_left(target, batch, head, tmp_path):
    earlier = Earlier.of(saved(near(head), target, tmp_path), head, target)
    torch.manual_seed(3)
    fresh = Eagle3.for_target(target, None, ttt_steps=2)
    boosted = DrafterModule(fresh, target, OptimizerSettings(), earlier=earlier)
    plain = DrafterModule(fresh, target, OptimizerSettings())
    left = earlier.missed(batch, batch.features(target, head.layers), target)
    monitored = [module._loss(given, None, torch.Generator())[0] for module, given in ((boosted, batch), (plain, left))]
    assert torch.equal(*monitored)
    assert not torch.equal(monitored[0], plain._loss(batch, None, torch.Generator())[0])
    # Held-out tokens count as they are.
    assert torch.equal(boosted._loss(batch)[0], plain._loss(batch)[0])
    assert [*boosted.state_dict()] == [*plain.state_dict()]


def test_other_hidden_states_are_refused(target, tmp_path):
    drafter = Eagle3.for_target(target, None, layers=(1, 2, 3))
    with pytest.raises(UserError, match=r"layers \[1, 2, 4\]: expected those .* \[1, 2, 3\]"):
        Earlier.of(saved(Eagle3.for_target(target, None, layers=(1, 2, 4)), target, tmp_path), drafter, target)


def test_what_a_store_does_not_hold_is_refused(target, head, tmp_path):
    mtp = saved(MTP.for_target(target, None), target, tmp_path)
    assert Earlier.of(mtp, head, target).drafters[0].family == "mtp"
    with pytest.raises(UserError, match=r"last hidden states of prompts: expected data\.store=null"):
        Earlier.of(mtp, head, target, stored=True)


def test_another_target_is_refused(target, head, tmp_path):
    stranger = Target.from_model(tiny_llama(num_hidden_layers=6, seed=1))
    with pytest.raises(UserError, match="target"):
        Earlier.of(saved(Eagle3.for_target(stranger, None), stranger, tmp_path), head, target)


def test_what_was_never_trained_is_refused(target, tmp_path):
    with pytest.raises(UserError, match="is prompt_lookup, which has no training: expected a trained drafter"):
        check_earlier(saved(PromptLookup(), target, tmp_path))


@pytest.mark.parametrize("named", [3, [3], [None]])
def test_what_is_no_path_is_refused(named):
    with pytest.raises(UserError, match=r"^boost names (3|None): expected paths of checkpoints, as boost=RUN"):
        check_earlier(named)


def test_a_kind_that_does_not_tell_is_refused_by_its_class(target, head, tmp_path):
    names = [saved(head, target, tmp_path), saved(JacobiForcing.for_target(target), target, tmp_path)]
    check_earlier(names[0])
    (tmp_path / "jacobi_forcing" / "model.safetensors").write_bytes(b"")  # nothing is loaded
    with pytest.raises(UserError, match="is jacobi_forcing, whose loss does not tell what it drafts right: expected a"):
        check_earlier(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_says_whether_its_loss_tells(family):
    target = Target.from_model(make_model())
    drafter, rows = FAMILIES[family](target), make_rows()
    told = drafter.training_loss(rows, rows.features(target, drafter.layers), target).drafted
    assert (told is not None) == drafter.tells_hits


def test_one_that_does_not_tell_though_its_class_says_so(target, batch, head, tmp_path, monkeypatch):
    earlier = Earlier.of(saved(head, target, tmp_path), head, target)
    whole = Eagle3.training_loss
    monkeypatch.setattr(Eagle3, "training_loss", lambda *given: whole(*given)._replace(drafted=None))
    with pytest.raises(UserError, match="does not tell what it drafts right"):
        earlier.missed(batch, batch.features(target, head.layers), target)


class Bound(Medusa):
    """It is bound where it is made, as docs/add-a-drafter.md says, and its loss reads what it shares."""

    def training_loss(self, batch, features, target, totals=None):
        assert self.target is target
        return super().training_loss(batch, features, target, totals)


def test_an_earlier_drafter_is_bound_to_the_target(target, batch, tmp_path):
    drafter = Bound.for_target(target, None, num_heads=2)
    earlier = Earlier.of(saved(drafter, target, tmp_path), drafter, target)
    assert earlier.missed(batch, batch.features(target, ()), target).loss_mask.shape == batch.loss_mask.shape
