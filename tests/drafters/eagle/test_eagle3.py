"""EAGLE-3's own: the draft vocabulary, the projection that starts from the target's, and its arguments."""

import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from specdraft.drafters.alignment import align
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


@pytest.mark.parametrize("projection", ["target", "frozen", "scratch"])
@pytest.mark.parametrize("norm", ["ones", "target", "frozen"])
def test_projection_and_norm_start_as_told_and_stay_if_frozen(projection, norm, packed):
    model = FAMILIES["gemma3"].build(final_logit_softcapping=None)  # whose norms multiply by one more than their weight
    target = Target.from_model(model)
    ids = torch.arange(0, V, 3)
    head = Eagle3.for_target(target, ids, projection=projection, output_norm=norm).double()
    rows = target.head.weight[ids]
    assert torch.allclose(head.lm_head.weight, rows, atol=1e-6) == (projection != "scratch")
    expected = torch.ones(32) if norm == "ones" else 1 + target.norm.weight
    torch.testing.assert_close(head.norm.weight, expected.double(), rtol=1e-4, atol=1e-4)
    if (projection, norm) == ("frozen", "frozen"):  # its logits are then the target's own of a state before its norm
        state = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        logits = head.logits(head.norm(state))
        torch.testing.assert_close(logits, target.logits(target.norm(state))[:, ids], rtol=1e-4, atol=1e-4)
    packed.input_ids %= V
    before = {name: value.clone() for name, value in head.named_parameters()}
    features = target.features(packed.input_ids, packed.position_ids, head.layers)
    head.training_loss(packed, features, target).loss.backward()
    torch.optim.SGD(head.parameters(), lr=0.1).step()
    stayed = {name for name, value in head.named_parameters() if torch.equal(value, before[name])}
    frozen = {"lm_head.weight": projection == "frozen", "norm.weight": norm == "frozen"}
    assert stayed == {name for name, still in frozen.items() if still}


def test_a_frozen_projection_spares_its_gradients_arithmetic(target):
    plain, frozen = (Eagle3.for_target(target, IDS, projection=start) for start in ("target", "frozen"))
    spared = 2.0 * plain.lm_head.weight.numel() * plain.passes
    assert frozen.training_flops(10) == (plain.training_flops(10)[0], plain.training_flops(10)[1] - spared)


def test_a_norm_of_another_kind_is_not_taken_over():
    target = Target.from_model(FAMILIES["cohere"].build())
    with pytest.raises(UserError, match="the final norm of CohereForCausalLM is no RMSNorm"):
        Eagle3.for_target(target, output_norm="target")
    Eagle3.for_target(target)


@pytest.mark.parametrize("option", ["projection", "output_norm"])
def test_an_unknown_start_is_refused(option, target):
    with pytest.raises(UserError, match=rf"model.drafter.{option} is 'warm': expected one of"):
        Eagle3.for_target(target, **{option: "warm"})


def test_regression_pulls_what_the_projection_reads_to_the_targets_last_state(target, packed):
    torch.manual_seed(0)
    head = Eagle3.for_target(target, IDS, ttt_steps=2, regression_weight=2.0, distillation_weight=0.5).double()
    features = target.features(packed.input_ids, packed.position_ids, head.layers)
    result = head.training_loss(packed, features, target)
    steps = head._unroll(align(packed, 2), head.feature(features), head.decay)
    expected = 0.0
    for index, step in enumerate(steps):
        distances = smooth_l1_loss(step.hidden, features.last.flatten(0, 1)[step.positions], reduction="none").mean(-1)
        assert float(result.metrics[f"step_{index}/regression_sum"]) == pytest.approx(distances.sum().item())
        mean = result.metrics[f"step_{index}/loss_sum"] / len(distances)
        expected = expected + 0.8**index * (2.0 * distances.mean() + 0.5 * mean)
    torch.testing.assert_close(result.loss, expected, rtol=1e-9, atol=1e-9)
    plain = Eagle3.for_target(target, IDS, ttt_steps=2).double()
    assert "step_0/regression_sum" not in plain.training_loss(packed, features, target).metrics


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
