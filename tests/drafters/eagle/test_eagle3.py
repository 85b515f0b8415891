"""EAGLE-3's own: the draft vocabulary, the projection that starts from the target's, and its arguments."""

import pytest
import torch

from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.eagle.forward import Attend
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from tests.drafters.eagle.variants import features_of
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
        output = head._layer(embedded, feature, (attend,))
        assert torch.equal(output.hidden, output.feature) == norm_output
        inner = head.midlayer(embedded, feature, attend)
        torch.testing.assert_close(output.hidden, head.norm(inner), rtol=0, atol=0)
        torch.testing.assert_close(output.feature, output.hidden if norm_output else inner, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0: expected at least 1"),
        ({"sliding_window": 4, "ttt_steps": 4}, "sliding_window is 4 and ttt_steps 4: expected a window of more"),
        ({"qk_norm": True, "attention_bias": True}, "attention_bias and qk_norm are both set: expected one of them"),
    ],
)
def test_a_head_that_cannot_be_is_refused(target, options, message):
    with pytest.raises(UserError, match=message):
        Eagle3.for_target(target, IDS, **options)


def test_the_residual_stream_begins_with_the_feature_or_with_the_normed_one(target):
    attend = Attend(torch.ones(4, 8).double(), torch.zeros(4, 8).double(), lambda query, *_: query, slice(None))
    for normed in (False, True):
        torch.manual_seed(0)
        head = Eagle3.for_target(target, IDS, norm_before_residual=normed).double()
        with torch.no_grad():  # attention and MLP add nothing
            head.midlayer.self_attn.o_proj.weight.zero_()
            head.midlayer.mlp.down_proj.weight.zero_()
            head.midlayer.hidden_norm.weight.mul_(3.0)
        embedded, feature = torch.randn(2, 4, target.hidden_size, dtype=torch.float64)
        expected = head.midlayer.hidden_norm(feature) if normed else feature
        torch.testing.assert_close(head._layer(embedded, feature, (attend,)).feature, expected, rtol=0, atol=0)


def test_the_fusion_reads_its_input_normed_as_a_whole(target):
    head = Eagle3.for_target(target, IDS, norm_before_fc=True).double()
    with torch.no_grad():
        head.input_norm.weight.normal_()
    aux = torch.randn(1, 5, 3 * target.hidden_size, dtype=torch.float64)
    normed = aux[0] * (aux[0].pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * head.input_norm.weight
    torch.testing.assert_close(head.feature(Features(aux, aux)), normed @ head.fc.weight.T)


def test_an_embedding_of_its_own_begins_as_the_targets_and_is_trained(target, packed):
    head = Eagle3.for_target(target, IDS, own_embedding=True, ttt_steps=2).double()
    torch.testing.assert_close(head.embed_tokens.weight, target.embedding_weight, rtol=1e-6, atol=1e-6)
    head.training_loss(packed, features_of(head, packed), target).loss.backward()
    read = head.embed_tokens.weight.grad.abs().sum(-1).nonzero()[:, 0]
    assert 0 < len(read) <= len(packed.input_ids.unique())
    assert target.embedding_weight.grad is None


def test_what_a_configuration_leaves_out_is_eagle_3(target):
    head = Eagle3.for_target(target, IDS)
    plain = head.config()
    off = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm", "attention_bias")
    assert plain | dict.fromkeys((*off, "own_embedding"), False) == plain
    assert plain | {"num_layers": 1, "sliding_window": None} == plain
    older = {name: value for name, value in plain.items() if name not in {*off, "own_embedding", "num_layers"}}
    assert Eagle3(**older).config() == plain
    assert head.fc.bias is None and head.lm_head.bias is None
    assert not Eagle3.reads_every_last
