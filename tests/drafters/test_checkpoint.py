"""Checkpoints: what is written is what is read, and what is wrong with one is said in a sentence."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from specdraft.drafters.checkpoint import (
    about_target,
    check_target,
    complete_target,
    find,
    load_drafter,
    other_options,
    save_drafter,
)
from specdraft.drafters.eagle import Eagle3
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.chat_template import BOUND


@pytest.fixture
def saved(target, tmp_path):
    torch.manual_seed(0)
    head = Eagle3.for_target(target, torch.arange(0, 97, 3), fc_norm=True, ttt_steps=2)
    return head, save_drafter(
        head, tmp_path / "run" / "drafter", target.identity, {"decoding": {"num_draft_tokens": 4}}
    )


def test_round_trip(saved, target):
    head, directory = saved
    loaded, config = load_drafter(directory)
    assert config["extra"]["decoding"]["num_draft_tokens"] == 4
    assert loaded.config() == head.config() and not loaded.training
    mine, theirs = head.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    check_target(config, target)


def test_options_of_the_chat_template_are_recorded_and_taken_up(saved, target, monkeypatch):
    head, directory = saved
    monkeypatch.setattr(target, "tokenizer", type("Tokenizer", (), {BOUND: {"enable_thinking": False}})())
    save_drafter(head, directory, target.identity, {"target": about_target(target)})
    _, config = load_drafter(directory)
    assert other_options(config, target) is None
    left_open = {"name": None, "revision": None, "dtype": "float32", "device": "cpu"}
    for given in ({}, {"chat_template_options": None}):
        settings = OmegaConf.create(left_open | given)
        OmegaConf.set_struct(settings, True)
        complete_target(settings, config)
        assert settings.name == target.identity.name and settings.chat_template_options.enable_thinking is False
    for given in ({}, {"enable_thinking": True}):
        settings = OmegaConf.create(left_open | {"chat_template_options": given})
        complete_target(settings, config)
        assert settings.chat_template_options == given
    monkeypatch.setattr(target, "tokenizer", None)
    said = other_options(config, target)
    assert said is not None and 'trained with the chat template\'s options {"enable_thinking": false}' in said
    assert other_options({}, target) is None  # written before they were recorded


def test_a_run_directory_leads_to_its_drafter(saved):
    _, directory = saved
    assert find(directory.parent) == directory


def test_overwriting_replaces_the_whole_directory(saved, target):
    head, directory = saved
    (directory / "stale").touch()
    save_drafter(head, directory, target.identity)
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in directory.parent.iterdir()] == ["drafter"]


def test_missing(tmp_path):
    with pytest.raises(UserError, match="no drafter checkpoint"):
        load_drafter(tmp_path / "nowhere")


def test_an_export_is_told_from_a_damaged_checkpoint(saved):
    _, directory = saved
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with pytest.raises(UserError, match=r"is a model for an engine, .* specdraft import"):
        load_drafter(directory)


def test_a_file_of_a_run_leads_to_the_run(saved):
    run = saved[1].parent
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best.ckpt").touch()
    with pytest.raises(UserError, match=rf"no drafter checkpoint at .*best.ckpt: .* as drafter/; {run} is one"):
        find(run / "checkpoints" / "best.ckpt")


def test_damaged_weights(saved):
    _, directory = saved
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="is damaged"):
        load_drafter(directory)


def test_damaged_config(saved):
    _, directory = saved
    (directory / "config.json").write_text("{")
    with pytest.raises(UserError, match="not readable JSON"):
        load_drafter(directory)


def test_weights_of_another_shape(saved):
    _, directory = saved
    config = json.loads((directory / "config.json").read_text())
    config["drafter"]["intermediate_size"] += 8
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not fit Eagle3"):
        load_drafter(directory)


@pytest.mark.parametrize("name", ["os.system", "specdraft.drafters.nothing.Here", "specdraft.targets.batch.Batch"])
def test_only_drafters_are_built(saved, name):
    _, directory = saved
    config = json.loads((directory / "config.json").read_text())
    config["drafter"]["_target_"] = name
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="which is not known"):
        load_drafter(directory)


def test_another_target_is_refused(saved, target):
    _, directory = saved
    _, config = load_drafter(directory)
    other = Target.from_model(type(target.model)(target.model.config).double())
    with pytest.raises(UserError, match="belongs to the target 'in-memory', which has other weights"):
        check_target(config, other)
