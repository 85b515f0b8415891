"""EAGLE-1: it continues the target's last hidden state, and the target's own head reads what it says."""

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.functional import kl_div
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.alignment import align
from specdraft.drafters.eagle import Eagle
from specdraft.drafters.eagle.forward import Output
from specdraft.entry import CONF
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch
from specdraft.training.module import DrafterModule
from specdraft.training.schedule import OptimizerSettings
from tests.drafters.alone import Alone
from tests.fakes import random_prompts, tiny_llama
from tests.families import FAMILIES, V


def family_target(name: str) -> Target:
    return Target.from_model(FAMILIES[name].build())


def batch_of(vocab_size: int) -> Batch:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (2, 12), generator=g)
    positions = torch.arange(12).expand(2, 12)
    return Batch(ids, positions, torch.zeros_like(ids), positions >= 3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere"])
def test_the_loss_is_the_papers_and_its_gradients_those_of_plain_formulas(name):
    """Of targets that cap or scale their logits as well: their own head is what decoding asks."""
    target, batch = family_target(name), batch_of(V)
    torch.manual_seed(0)
    head = Eagle.for_target(target, ttt_steps=3, regression_weight=0.7, distillation_weight=0.3).double()
    features = target.features(batch.input_ids, batch.position_ids, head.layers)
    result = head.training_loss(batch, features, target)
    assert not any(value.requires_grad for value in result.metrics.values())
    result.loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()

    last = features.last.flatten(0, 1)
    expected = torch.zeros(())
    for index, (step, rows) in enumerate(
        zip(head._unroll(align(batch, 3), head.feature(features), head.decay), align(batch, 3).supervised, strict=True)
    ):
        error = (step.hidden - last[rows + 1 + index]).abs()  # row r says at step s what the target is at r+1+s
        regression = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean()
        q, p = (target.logits(hidden).log_softmax(-1) for hidden in (step.hidden, last[rows + 1 + index]))
        divergence = kl_div(q, p, log_target=True, reduction="batchmean")
        expected = expected + 0.8**index * (0.7 * regression + 0.3 * divergence)
        measured = result.metrics[f"step_{index}/regression_sum"] / result.metrics[f"step_{index}/total"]
        torch.testing.assert_close(measured, regression.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    expected.backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-8, atol=1e-12)


def test_a_head_that_is_right_has_no_error_and_is_always_accepted(monkeypatch):
    """Without attention a hidden state depends on its own token alone, so the right next feature is known: a shift by
    one anywhere, in the loss or in decoding, would show."""
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    target = Target.from_model(model)
    every = torch.arange(64)[:, None]
    states = target.features(every, torch.zeros_like(every), ()).last[:, 0]  # [V, H]
    head = Eagle.for_target(target, ttt_steps=3)

    def oracle(embedded, feature, attends):
        token = torch.cdist(embedded, target.embedding_weight).argmin(-1)[attends[-1].queries]
        return Output(states[token], states[token])

    monkeypatch.setattr(head, "_layer", oracle)
    batch = batch_of(64)
    metrics = head.training_loss(batch, target.features(batch.input_ids, batch.position_ids, ()), target).metrics
    for step in range(3):
        assert metrics[f"step_{step}/regression_sum"] < 1e-5 and metrics[f"step_{step}/loss_sum"] < 1e-4
        assert metrics[f"step_{step}/match_sum"] == metrics[f"step_{step}/total"] > 0
    for prompt in random_prompts(4, [3, 7]):
        result = Decoder(target, head, 4).generate(prompt, 21)
        assert result.accepted == [4] * 4  # five tokens a round behind the prompt's own


def test_by_default_it_learns_one_step_with_the_papers_weights(target, packed):
    head = Eagle.for_target(target).double()
    result = head.training_loss(packed, target.features(packed.input_ids, packed.position_ids, ()), target)
    metrics = result.metrics
    assert head.layers == () and not any(name.startswith("step_1/") for name in metrics)
    mean = (metrics["step_0/regression_sum"] + 0.1 * metrics["step_0/loss_sum"]) / metrics["step_0/total"]
    torch.testing.assert_close(result.loss, mean)


def test_what_it_holds_is_what_its_docstring_says(target):
    head = Eagle.for_target(target)
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == {
        "fc.weight": (32, 64),
        "midlayer.self_attn.q_proj.weight": (32, 32),
        "midlayer.self_attn.k_proj.weight": (16, 32),
        "midlayer.self_attn.v_proj.weight": (16, 32),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
    }


def test_the_layer_is_transformers_own_without_its_first_norm(target, packed):
    """What serving engines run, from an implementation that is not ours."""
    torch.manual_seed(0)
    head = Eagle.for_target(target).double()
    config = target.config
    layer = LlamaDecoderLayer(config, layer_idx=0).double()
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(head.midlayer.state_dict())
    ids, positions = packed.input_ids[:1, :9], packed.position_ids[:1, :9]
    last = target.features(ids, positions, ()).last
    tokens = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
    x = torch.cat([torch.nn.functional.embedding(tokens, target.embedding_weight), last], dim=-1) @ head.fc.weight.T
    mask = torch.full((9, 9), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    expected = layer(x, attention_mask=mask, position_embeddings=target.decoder.rotary_emb(x, positions))
    state = Alone(head, int(ids[0, 0]), 16)
    state.advance(tokens[0], target.features(ids, positions, ()))
    torch.testing.assert_close(state.along([]), target.logits(expected[0, -1:]), rtol=1e-9, atol=1e-9)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_noise_disturbs_what_is_read_and_not_what_is_learned(target, packed):
    head = Eagle.for_target(target, feature_noise=0.1).double()
    features = target.features(packed.input_ids, packed.position_ids, ())
    noisy = head.augment(features, seeded(0))
    assert noisy.last is features.last
    noise = head.feature(noisy) - head.feature(features)
    count = noise.numel()
    assert -0.1 <= noise.min() < -0.095 and 0.095 < noise.max() <= 0.1
    assert abs(noise.mean()) < 4 * 0.1 / (3 * count) ** 0.5
    assert noise.var().item() == pytest.approx(0.1**2 / 3, rel=0.1)
    exact = head.training_loss(packed, features, target)
    disturbed = head.training_loss(packed, noisy, target)
    steps = head._unroll(align(packed, 1), head.feature(noisy), head.decay)
    wanted = features.last.flatten(0, 1)[steps[0].positions]
    regression = torch.nn.functional.smooth_l1_loss(steps[0].hidden, wanted, reduction="none").mean(-1).sum()
    torch.testing.assert_close(disturbed.metrics["step_0/regression_sum"], regression)
    assert disturbed.loss != exact.loss


def test_noise_is_drawn_from_the_generator_alone(target, packed):
    head = Eagle.for_target(target, feature_noise=0.1)
    features = target.features(packed.input_ids, packed.position_ids, ())
    first, again, other = (head.augment(features, seeded(seed)).aux for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (
        head.augment(Features(features.aux.bfloat16(), features.last.bfloat16()), seeded(1)).aux.dtype == torch.float32
    )


def test_without_noise_features_are_left_alone(target, packed):
    features = target.features(packed.input_ids, packed.position_ids, ())
    assert Eagle.for_target(target).augment(features, seeded(0)) is features
    with pytest.raises(UserError, match=r"feature_noise is -0\.1: expected 0"):
        Eagle.for_target(target, feature_noise=-0.1)


def test_the_noise_that_is_configured_is_the_papers():
    assert OmegaConf.load(CONF / "model" / "eagle.yaml").drafter.feature_noise == 0.1


def test_training_draws_noise_by_the_place_of_the_batch_and_validation_none(target, packed, monkeypatch):
    module = DrafterModule(Eagle.for_target(target, feature_noise=0.1), target, OptimizerSettings())
    read, feature = [], module.drafter.feature
    monkeypatch.setattr(module.drafter, "feature", lambda features: read.append(feature(features)) or read[-1])
    for seed in (5, 5, 6):
        monkeypatch.setattr(module, "_place", lambda _, seed=seed: seed)
        module.training_step(packed, 0)
    module.validation_step(packed, 0)
    first, again, other, validation = read
    assert torch.equal(first, again) and not torch.equal(first, other)
    exact = target.features(packed.input_ids, packed.position_ids, ()).last.flatten(0, 1).to(first.dtype)
    assert torch.equal(validation, exact) and not torch.equal(first, exact)


def test_a_part_of_the_vocabulary_is_refused(target):
    Eagle.for_target(target, torch.arange(97))
    with pytest.raises(UserError, match=r"set model\.draft_vocab_size=null"):
        Eagle.for_target(target, torch.arange(10))


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5)])
def test_a_loss_of_one_part_or_of_two_alike_is_taken_and_kept(target, weights):
    options = {"regression_weight": weights[0], "distillation_weight": weights[1], "feature_noise": 0.05}
    head = Eagle.for_target(target, **options)
    assert options.items() <= head.config().items()
    assert options.keys() | {"divergence", "step_decay"} <= Eagle.training_options


@pytest.mark.parametrize("weights", [(0.0, 0.0), (-1.0, 1.0), (2.0, -1.0)])
def test_weights_that_leave_nothing_to_learn_are_refused(target, weights):
    with pytest.raises(UserError, match="none below 0 and one above"):
        Eagle.for_target(target, regression_weight=weights[0], distillation_weight=weights[1])
