"""``specdraft import``: an EAGLE-3 head as an engine loads it becomes a checkpoint of the target that is named."""

import json
import sys

import pytest
import torch

from specdraft.commands.import_head import main
from specdraft.drafters.checkpoint import about_target, check_target, load_drafter, save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target


def test_it_writes_a_checkpoint_of_this_target(tmp_path, monkeypatch, capsys):
    target = Target.load("embedded://tiny", device="cpu")
    head = Eagle3.for_target(target, torch.arange(0, target.vocab_size, 4), ttt_steps=1)
    trained = save_drafter(head, tmp_path / "trained", target.identity, {"target": about_target(target)})
    public = export(trained, VLLM(dtype="float32"), tmp_path / "public")
    words = ["specdraft", str(public), "--target", "embedded://tiny", "--output", str(tmp_path / "head")]
    monkeypatch.setattr(sys, "argv", words)
    main()
    assert capsys.readouterr().out == f"checkpoint: {tmp_path / 'head'}\n"
    imported, config = load_drafter(tmp_path / "head")
    state = imported.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())
    check_target(config, target)
    assert config["extra"]["target"]["num_hidden_layers"] == target.num_layers
    with pytest.raises(SystemExit) as status:
        main()
    assert status.value.code == 2 and "exists: expected a new directory" in capsys.readouterr().err


def test_it_says_that_weights_are_quantized_and_the_checkpoint_follows(tmp_path, monkeypatch, capsys):
    target = Target.load("embedded://tiny", device="cpu")
    head = Eagle3.for_target(target, torch.arange(0, target.vocab_size, 4), ttt_steps=1)
    trained = save_drafter(head, tmp_path / "trained", target.identity, {"target": about_target(target)})
    public = export(trained, VLLM(dtype="float32"), tmp_path / "public", quantization="int4")
    words = ["specdraft", str(public), "--target", "embedded://tiny", "--output", str(tmp_path / "head")]
    monkeypatch.setattr(sys, "argv", words)
    main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("quantized: the files hold int4 weights") and second.startswith("checkpoint: ")
    imported, config = load_drafter(tmp_path / "head")
    assert imported.quantization == config["quantization"] == "int4"
    again = export(tmp_path / "head", VLLM(dtype="float32"), tmp_path / "again")
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (public / weights).read_bytes()


def test_other_weights_than_those_of_its_training_are_refused(tmp_path, monkeypatch, capsys):
    target = Target.load("embedded://tiny", device="cpu")
    head = Eagle3.for_target(target, torch.arange(0, target.vocab_size, 4), ttt_steps=1)
    trained = save_drafter(head, tmp_path / "trained", target.identity, {"target": about_target(target)})
    public = export(trained, VLLM(dtype="float32"), tmp_path / "public")
    said = json.loads((public / "target.json").read_text())
    (public / "target.json").write_text(json.dumps(said | {"weights_hash": "another"}))
    words = ["specdraft", str(public), "--target", "embedded://tiny", "--output", str(tmp_path / "head")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        main()
    assert "has other weights than the given" in capsys.readouterr().err and not (tmp_path / "head").exists()
