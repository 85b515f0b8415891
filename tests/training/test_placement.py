"""What a placement, an optimizer or an offload refuses, and the line about sizes."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from specdraft.data.regeneration import RegenerationSettings, Request
from specdraft.data.regeneration.in_process import InProcess
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.training.preflight import check_settings
from specdraft.training.summary import explain_sizes

CONF = Path(__file__).parents[2] / "conf"


def test_unknown_placements_and_missing_ranks_are_one_sentence(monkeypatch):
    with pytest.raises(
        UserError, match=r"target.placement is 'zero4': expected one of replicated, zero3, device_map, remote"
    ):
        Target.load("embedded://tiny", placement="zero4")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match=r"RANK is not set: .* start them with torchrun"):
        Target.load("embedded://tiny", placement="zero3")


def test_a_cut_target_neither_evaluates_nor_regenerates(target, monkeypatch):
    config = OmegaConf.load(CONF / "train.yaml")
    settings = {
        "trainer": {"max_steps": 1, "accumulate_grad_batches": 1, "accelerator": "cpu", "devices": 2, "num_nodes": 1},
        "live": config.live,
        "checkpoint": config.checkpoint,
        "target": {"placement": "zero3"},
        "evaluate": True,
    }
    with pytest.raises(UserError, match="expected evaluate=false"):
        check_settings(OmegaConf.create(settings))
    check_settings(OmegaConf.create(settings | {"evaluate": False}))
    spread = settings | {"target": {"placement": "device_map"}}
    with pytest.raises(UserError, match=r"trainer.devices=2 asks for more: set trainer.devices=1"):
        check_settings(OmegaConf.create(spread))
    monkeypatch.setattr(target, "engine", object())
    with pytest.raises(UserError, match="placement=zero3 does not regenerate"):
        list(InProcess().answers(target, [Request([5, 6], (), (), 0.0, 0)], RegenerationSettings(max_new_tokens=4)))


def test_sizes_are_explained(target, tmp_path):
    drafter = Medusa.for_target(target, num_heads=2)
    save_drafter(drafter, tmp_path / "drafter", target.identity)
    assert explain_sizes(tmp_path, drafter).endswith("nothing of the target")
    (tmp_path / "checkpoints" / "last.ckpt").mkdir(parents=True)
    (tmp_path / "checkpoints" / "last.ckpt" / "part.pt").write_bytes(b"1" * 120_000)
    parameters = 2 * (32 * 32 + 32 + 64 * 32)
    expected = f"0.03 MB: {parameters:,} parameters x 4 bytes, nothing of the target; last.ckpt 0.12 MB: with"
    assert explain_sizes(tmp_path, drafter).startswith(expected)
