from pathlib import Path
from typing import get_args

import pytest
import torch
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from omegaconf import OmegaConf

from specdraft.data.regeneration.in_process import InProcess
from specdraft.data.regeneration.request import RegenerationSettings, Request
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.jacobi_forcing import JacobiForcing
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.training import preflight
from specdraft.training.planning import meta_target
from specdraft.training.preflight import check_settings
from tests.fakes import tiny_llama

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("accelerator=tpu", "trainer.accelerator is tpu: expected auto, cpu or gpu"),
        ("accelerator=gpu", "trainer.accelerator is gpu, and torch finds no GPU here"),
        ("devices=0", "trainer.devices is 0 on 1 nodes: expected at least one of each"),
        ("precision=fp8", "trainer.precision is fp8: expected auto, 32-true, bf16-mixed"),
    ],
)
def test_devices_and_precision_are_checked_first(composed, override, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=sentence):
        preflight.check_devices(composed(f"trainer.{override}").trainer)


def test_no_more_gpus_than_there_are(composed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for devices in ("auto", "2", "[0,1]", "-1"):
        preflight.check_devices(composed(f"trainer.devices={devices}", "trainer.num_nodes=4").trainer)
    for devices in ("3", "[1,2]"):
        with pytest.raises(UserError, match=r"trainer.devices is .*, and there are 2 GPUs"):
            preflight.check_devices(composed(f"trainer.devices={devices}").trainer)


def test_precisions_are_lightnings():
    spelt = {str(value) for kind in get_args(_PRECISION_INPUT) for value in get_args(kind)}
    assert set(preflight.PRECISIONS) == spelt


def test_memory_is_checked_before_any_work(composed, monkeypatch, tmp_path):
    shape = meta_target.shape_config(dict(composed("target=llama-70b").target_shape))
    monkeypatch.setattr(preflight, "target_config", lambda settings: shape)
    with pytest.raises(UserError, match=r"Llama-3.3-70B-Instruct with its drafter needs about \d{3}\.\d GB"):
        preflight.check_before_work(composed("target=llama-70b", "trainer=cpu"), tmp_path)


@pytest.mark.parametrize("option", ["init=runs/none", "boost=runs/none", "boost=[embedded://smollm2-eagle3,runs/none]"])
def test_drafters_to_begin_with_are_looked_for_first(composed, tmp_path, option):
    with pytest.raises(UserError, match="there is no drafter checkpoint at runs/none: expected a directory with"):
        preflight.check_before_work(composed(option, "trainer=cpu"), tmp_path)


def test_a_drafter_that_cannot_say_what_it_drafts_right_is_refused_first(composed, tmp_path, monkeypatch):
    target = Target.from_model(tiny_llama())
    drafter = JacobiForcing.for_target(target)
    monkeypatch.setattr(preflight, "make_directory", lambda directory: pytest.fail("work has begun"))
    for name in (checkpoint := save_drafter(drafter, tmp_path / "other", target.identity, {}), f"[{checkpoint}]"):
        with pytest.raises(UserError, match=r"boost=.*other is jacobi_forcing, whose loss does not tell"):
            preflight.check_before_work(composed(f"boost={name}", "trainer=cpu"), tmp_path)


@pytest.mark.parametrize(
    "options", [["init_vocabulary=data"], ["init_vocabulary=new", "init=embedded://smollm2-eagle3"]]
)
def test_a_vocabulary_is_chosen_anew_for_a_drafter_that_is_there(composed, tmp_path, options):
    with pytest.raises(UserError, match=r"init_vocabulary is (data, with init=None|new, .*): expected own, or data"):
        preflight.check_before_work(composed(*options, "trainer=cpu"), tmp_path)


def test_muon_is_refused_where_deepspeed_cuts_matrices(composed, tmp_path, capsys):
    muon = composed("model.optimizer.name=muon", "strategy=deepspeed_zero2", "trainer.devices=2", "trainer=cpu")
    with pytest.raises(UserError, match=r"expected strategy=single or strategy=ddp, or model.optimizer.name=adamw"):
        preflight.check_before_work(muon, tmp_path)
    preflight.check_before_work(composed("model.optimizer.name=muon", "trainer=cpu"), tmp_path)
    either = composed("model.optimizer.name=auto", "strategy=deepspeed_zero2", "trainer.devices=2", "trainer=cpu")
    assert "optimizer: AdamW" not in capsys.readouterr().out
    preflight.check_before_work(either, tmp_path)
    assert capsys.readouterr().out.count("optimizer: AdamW, as DeepSpeed cuts") == 1


def test_unwritable_directory(composed, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to the directory"):
        preflight.check_before_work(composed(), tmp_path / "file" / "run")


def test_a_cut_target_neither_evaluates_nor_regenerates(target, monkeypatch):
    config = OmegaConf.load(CONF / "train.yaml")
    settings = {
        "seed": 0,
        "trainer": {**OmegaConf.load(CONF / "trainer" / "default.yaml"), "accelerator": "cpu", "devices": 2},
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
        list(
            InProcess().answers(
                target, [Request([5, 6], (), (), Sampling(), 0, 4)], RegenerationSettings(max_new_tokens=4)
            )
        )


def test_without_live_acceptance_there_is_no_head_to_evaluate(composed):
    alone = "callbacks=[checkpoint,stop_signal]"
    with pytest.raises(UserError, match="expected evaluate=false and export=null without it"):
        check_settings(composed(alone))
    check_settings(composed(alone, "evaluate=false", "export=null"))
