"""Muon beside AdamW: each part as torch's own, alone; one state for both, which a checkpoint brings back."""

import copy

import pytest
import torch

from specdraft.training.muon import MuonAdamW, orthogonal
from specdraft.training.schedule import OptimizerSettings

SETTINGS = OptimizerSettings(name="muon", learning_rate=1e-2, muon_learning_rate=3e-2, weight_decay=0.1)


def module() -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({name: torch.nn.Linear(6, 4) for name in ("fc", "lm_head")})


def give_gradients(module: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(module: torch.nn.Module, *optimizers: torch.optim.Optimizer, steps: range = range(5)) -> None:
    for step in steps:
        give_gradients(module, step)
        for optimizer in optimizers:
            optimizer.step()


def test_each_part_is_what_torch_does_alone(monkeypatch):
    monkeypatch.setattr("specdraft.training.muon.emulates_bfloat16", lambda device: False)
    ours, theirs = module(), module()
    optimizer = SETTINGS.build(ours)
    assert isinstance(optimizer, MuonAdamW)
    muon = torch.optim.Muon(
        [theirs["fc"].weight], lr=3e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    rest = [
        {"params": [theirs["lm_head"].weight], "weight_decay": 0.1},
        {"params": [theirs["fc"].bias, theirs["lm_head"].bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95))
    before = ours["fc"].weight.detach().clone()
    train(ours, optimizer)
    train(theirs, muon, adamw)
    assert (ours["fc"].weight - before).abs().max() > 1e-2
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (24, 24)])
def test_matrices_become_orthogonal_in_either_dtype(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    group = torch.optim.Muon([torch.nn.Parameter(matrix)]).param_groups[0]
    options = group["ns_coefficients"], group["ns_steps"], group["eps"]
    exact, rounded = orthogonal(matrix, *options), orthogonal(matrix.bfloat16(), *options)
    values = torch.linalg.svdvals(exact)
    assert exact.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    assert values.min() > 0.3 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.cosine_similarity(exact.flatten(), (u @ v).flatten(), dim=0) > 0.95
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0.05)


def test_where_bfloat16_is_emulated_updates_are_float32(monkeypatch):
    monkeypatch.setattr("specdraft.training.muon.emulates_bfloat16", lambda device: True)
    ours, theirs = module(), module()
    train(ours, SETTINGS.build(ours))
    monkeypatch.setattr("specdraft.training.muon.emulates_bfloat16", lambda device: False)
    train(theirs, SETTINGS.build(theirs))
    mine, other = ours["fc"].weight, theirs["fc"].weight
    assert not torch.equal(mine, other)
    torch.testing.assert_close(mine, other, rtol=0, atol=0.01)


def test_the_schedule_moves_both_parts():
    net = module()
    optimizer = SETTINGS.build(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(net, optimizer, steps=range(1))
    schedule.step()
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == pytest.approx([1.5e-2, 5e-3])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(net.state_dict())
    train(net, optimizer, steps=range(1, 2))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_loaded_state_goes_on_as_if_never_stopped(tmp_path):
    whole, stopped = module(), module()
    train(whole, SETTINGS.build(whole), steps=range(4))
    first = SETTINGS.build(stopped)
    train(stopped, first, steps=range(2))
    torch.save([stopped.state_dict(), first.state_dict()], tmp_path / "state")
    weights, state = torch.load(tmp_path / "state", weights_only=True)
    resumed = module()
    resumed.load_state_dict(weights)
    second = SETTINGS.build(resumed)
    second.load_state_dict(state)
    train(resumed, second, steps=range(2, 4))
    for mine, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_parameter_without_a_gradient_stays():
    """As where a bad step is left out."""
    net = module()
    optimizer = SETTINGS.build(net)
    train(net, optimizer, steps=range(1))
    before = copy.deepcopy(net.state_dict())
    optimizer.zero_grad(set_to_none=True)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_run_with_muon_learns_and_resumes(make_run, tmp_path):
    def prepared(steps, directory):
        trainer, net, data, *_ = make_run(tmp_path / directory, max_steps=steps, every=0, accelerator="cpu")
        net.settings = OptimizerSettings(name="muon", learning_rate=3e-3, muon_learning_rate=1e-2, schedule="constant")
        return trainer, net, data

    trainer, net, data = prepared(12, "whole")
    trainer.fit(net, data)
    assert sum(net.losses[-3:]) < sum(net.losses[:3])
    trainer, half, data = prepared(6, "half")
    trainer.fit(half, data)
    trainer, again, data = prepared(12, "again")
    trainer.fit(again, data, ckpt_path=tmp_path / "half" / "checkpoints" / "last.ckpt", weights_only=True)
    assert again.losses == pytest.approx(net.losses[6:], rel=1e-5)
