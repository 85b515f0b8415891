import copy
import math

import pytest
import torch

from specdraft.errors import UserError
from specdraft.training.muon import MuonAdamW
from specdraft.training.schedule import OptimizerSettings
from specdraft.training.strategies import deepspeed, offloads_optimizer


def course(**settings) -> list[float]:
    """The learning rates of 100 steps over the peak, after 10 of warm-up, down to 0.05."""
    optimizer = OptimizerSettings(warmup_steps=0.1, final_ratio=0.05, **settings)
    ratios = [optimizer.ratio(step, 100) for step in range(100)]
    assert ratios[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    return ratios


def test_the_cosine_and_the_line_decay_from_the_peak():
    cosine, linear = course(), course(schedule="linear")
    assert cosine[54] == linear[54] == pytest.approx(0.525) and cosine[-1] == linear[-1] == pytest.approx(0.05)
    assert cosine[29] == pytest.approx(0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * 20 / 90)))
    assert linear[29] == pytest.approx(1 - 0.95 * 20 / 90)
    assert cosine == sorted(cosine[:10]) + sorted(cosine[10:], reverse=True)


@pytest.mark.parametrize(
    ("shape", "left"), [("sqrt", lambda progress: 1 - math.sqrt(progress)), ("linear", lambda progress: 1 - progress)]
)
@pytest.mark.parametrize("decay_steps", [20, 0.2])
def test_wsd_is_stable_until_its_last_steps(shape, left, decay_steps):
    ratios = course(schedule="wsd", decay_steps=decay_steps, decay_shape=shape)
    assert ratios[10:80] == [1.0] * 70
    assert ratios[80:] == pytest.approx([0.05 + 0.95 * left((step + 1) / 20) for step in range(20)])


def test_a_constant_learning_rate_stays():
    assert course(schedule="constant")[9:] == pytest.approx([1.0] * 91)


def test_a_warm_up_counts_steps_or_a_fraction():
    assert OptimizerSettings(warmup_steps=5).ratio(1, 100) == pytest.approx(0.4)
    assert OptimizerSettings(warmup_steps=0).ratio(0, 100) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"learning_rate": 0}, "learning_rate is 0: expected a positive number"),
        ({"decay_steps": 0}, "decay_steps is 0: expected a positive number"),
        ({"learning_rate": "high"}, "learning_rate is high: expected a positive number"),
        ({"final_ratio": "low"}, "final_ratio is low: expected a number from 0 upwards"),
        ({"warmup_steps": -3}, "warmup_steps is -3: expected a number from 0 upwards"),
        ({"name": "lion"}, "name is 'lion': expected adamw, muon, auto or sgd"),
        ({"name": "muon", "muon_learning_rate": 0.0}, "muon_learning_rate is 0.0: expected a positive number"),
        ({"learning_rate_factors": {"fc": 0}}, "learning_rate_factors.fc is 0: expected a positive number"),
        ({"schedule": "stairs"}, "schedule is 'stairs': expected cosine, wsd, linear or constant"),
        ({"decay_shape": "cubic"}, "decay_shape is 'cubic': expected sqrt or linear"),
    ],
)
def test_bad_settings_are_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        OptimizerSettings(**settings)


def test_sgd_is_not_offloaded():
    module = torch.nn.Linear(2, 2)
    sgd = OptimizerSettings(name="sgd", beta1=0.0).build(module)
    assert type(sgd) is torch.optim.SGD and len(sgd.param_groups) == 2
    with pytest.raises(UserError, match="expected adamw with strategy"):
        OptimizerSettings(name="sgd").build(module, offloaded=True)
    assert offloads_optimizer(deepspeed(2, offload_optimizer=True)) and not offloads_optimizer(deepspeed(3))


def test_muon_takes_the_matrices_that_are_no_vocabulary_table():
    names = ("fc", "lm_head", "embed_tokens")
    module = torch.nn.ModuleDict({name: torch.nn.Linear(4, 3, bias=name == "fc") for name in names})
    settings = OptimizerSettings(name="muon", learning_rate=1e-2, muon_learning_rate=3e-2, weight_decay=0.1)
    optimizer = settings.build(module)
    found = [({id(p) for p in group["params"]}, group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    fc, head, embedding = (module[name] for name in names)
    tables = {id(head.weight), id(embedding.weight)}
    assert found == [({id(fc.weight)}, 3e-2, 0.1), (tables, 1e-2, 0.1), ({id(fc.bias)}, 1e-2, 0.0)]
    with pytest.raises(UserError, match="DeepSpeed cuts them into flat pieces"):
        settings.build(module, fusable=False)


def test_either_of_muon_and_adamw():
    module = torch.nn.Linear(4, 3)
    settings = OptimizerSettings(name="auto")
    assert isinstance(settings.build(module), MuonAdamW)
    assert isinstance(settings.build(module, fusable=False), torch.optim.AdamW)


def test_factors_are_of_their_own_parameters():
    module = torch.nn.ModuleDict({name: torch.nn.Linear(4, 3) for name in ("fc", "lm_head")})
    optimizer = OptimizerSettings(learning_rate=1e-2, learning_rate_factors={"lm_head": 0.1}).build(module)
    rates = {id(each): group["lr"] for group in optimizer.param_groups for each in group["params"]}
    assert {name: rates[id(each)] for name, each in module.named_parameters()} == pytest.approx(
        {"fc.weight": 1e-2, "fc.bias": 1e-2, "lm_head.weight": 1e-3, "lm_head.bias": 1e-3}
    )
    with pytest.raises(UserError, match=r"has 'norm': expected a part of the name .* as fc.weight"):
        OptimizerSettings(learning_rate_factors={"norm": 2.0}).build(module)


def updated(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """The parameters after as many updates by known gradients."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_the_fused_update_is_the_plain_one():
    torch.manual_seed(1)
    module = torch.nn.Linear(37, 19)
    start = [parameter.detach().clone() for parameter in module.parameters()]
    other = copy.deepcopy(module)
    settings = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1)
    fused, plain = settings.build(module), settings.build(other, fusable=False)
    assert [group["fused"] for group in fused.param_groups] == [True, True]
    assert [group["fused"] for group in plain.param_groups] == [None, None]
    for ours, theirs, before in zip(updated(module, fused, 20), updated(other, plain, 20), start, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert (ours - before).abs().min() > 1e-4


@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_does_not_decide_whether_the_update_is_fused(fused):
    module = torch.nn.Linear(3, 2)
    settings = OptimizerSettings()
    written, read = settings.build(module, fusable=fused), settings.build(module, fusable=not fused)
    updated(module, written, 1)
    state = written.state_dict()
    assert {group["fused"] for group in state["param_groups"]} == {None}
    read.load_state_dict(state)
    assert {group["fused"] for group in read.param_groups} == {None if fused else True}
    updated(module, read, 1)
    assert {float(each["step"]) for each in read.state.values()} == {2.0}


def test_gradients_of_a_fused_optimizer_are_clipped_in_mixed_precision(make_run):
    trainer, module, data, *_ = make_run(max_steps=2, every=0, precision="bf16-mixed")
    trainer.fit(module, data)
    (optimizer,) = trainer.optimizers
    assert optimizer.param_groups[0]["fused"] and all(math.isfinite(loss) for loss in module.losses)
