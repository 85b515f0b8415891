import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

from specdraft.errors import UserError
from specdraft.training import strategies


def test_single_refuses_several_devices():
    assert strategies.single(1) == "auto"
    with pytest.raises(UserError, match="strategy=single trains on one device"):
        strategies.single(2)


def test_automatic_follows_the_devices(monkeypatch):
    assert strategies.automatic("cpu", "auto") == "auto"
    assert strategies.automatic("cpu", 2) == "ddp"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert strategies.automatic("gpu", 1) == "auto"
    chosen = strategies.automatic("auto", "auto")
    assert isinstance(chosen, strategies.PortableDeepSpeedStrategy)
    assert chosen.config["zero_optimization"]["stage"] == 2


def test_deepspeed_runs_over_gloo_without_gpus():
    strategy = strategies.deepspeed(stage=1)
    strategy._accelerator = CPUAccelerator()
    assert strategy._process_group_backend == "gloo"
    assert strategy.config["zero_optimization"]["stage"] == 1
