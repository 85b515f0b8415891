"""EAGLE-3's own: the draft vocabulary, the projection that starts from the target's, and its arguments."""

import pytest
import torch

from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.eagle.forward import Attend
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.families import FAMILIES, V

IDS = torch.arange(3, 97, 2)


def test_draft_vocabulary_is_kept_as_offsets(target):
    head = Eagle3.for_target(target, IDS)
    assert torch.equal(head.d2t, IDS - torch.arange(len(IDS))) and head.d2t.dtype == torch.int64
    assert torch.equal(head.t2d.nonzero()[:, 0], IDS) and head.t2d.dtype == torch.bool
    assert torch.equal(head.draft_ids, IDS)
    torch.testing.assert_close(head.lm_head.weight.double(), target.head.weight[IDS], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "granite", "cohere"])
def test_the_projection_starts_as_the_targets_own_with_its_scale(name):
    """Engines apply the target's logit scale to no head, so it is part of the head's weights."""
    target = Target.from_model(FAMILIES[name].build())
    assert (target.logit_scale == 1.0) == (name == "llama")
    ids = torch.arange(0, V, 3)
    head = Eagle3.for_target(target, ids).double()
    last = torch.randn(5, target.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.logits(last), target.logits(last)[:, ids], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ids", [[5, 3], [3, 3], [-1, 4], [3, 97]])
def test_a_bad_draft_vocabulary_is_refused(target, ids):
    with pytest.raises(UserError, match="ascending ids below 97"):
        Eagle3.for_target(target, torch.tensor(ids))


def test_a_draft_vocabulary_larger_than_the_vocabulary_is_refused(target):
    config = Eagle3.for_target(target).config()
    with pytest.raises(UserError, match="expected 1 to 97"):
        Eagle3(**{**config, "draft_vocab_size": 98})


def test_the_options_of_eagle_3_1_change_what_is_held_and_said(target):
    plain, newer = (Eagle3.for_target(target, IDS, fc_norm=new, norm_output=new) for new in (False, True))
    assert newer.state_dict().keys() - plain.state_dict().keys() == {f"fc_norm.{i}.weight" for i in range(3)}
    assert plain.config() | {"fc_norm": True, "norm_output": True} == newer.config()
    assert Eagle3(**newer.config()).config() == newer.config()


def test_what_is_fed_back_is_before_or_after_the_norm(target):
    """EAGLE-3 feeds the layer's own output back, EAGLE-3.1 what its projection reads."""
    for norm_output in (False, True):
        torch.manual_seed(0)
        head = Eagle3.for_target(target, IDS, norm_output=norm_output).double()
        with torch.no_grad():
            head.norm.weight.mul_(3.0)
        embedded, feature = torch.randn(2, 4, target.hidden_size, dtype=torch.float64)
        attend = Attend(torch.ones(4, 8).double(), torch.zeros(4, 8).double(), lambda query, *_: query, slice(None))
        output = head._layer(embedded, feature, attend)
        assert torch.equal(output.hidden, output.feature) == norm_output
        inner = head.midlayer(embedded, feature, attend)
        torch.testing.assert_close(output.hidden, head.norm(inner), rtol=0, atol=0)
        torch.testing.assert_close(output.feature, output.hidden if norm_output else inner, rtol=0, atol=0)


def test_what_a_configuration_leaves_out_is_eagle_3(target):
    head = Eagle3.for_target(target, IDS)
    assert head.config() | {"fc_norm": False, "norm_output": False} == head.config()
    assert head.fc.bias is None and head.lm_head.bias is None
    assert not Eagle3.reads_every_last
