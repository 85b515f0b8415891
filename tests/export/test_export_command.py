"""``python export`` as a user runs it: a good run, --help, and every bad input in one sentence."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from specdraft.drafters.draft_model import DraftModel

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(*overrides):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["export", *map(str, overrides)])
        runpy.run_path(str(REPOSITORY / "export"), run_name="__main__")

    return call


def test_a_run_directory_from_anywhere(run, make_checkpoint, tmp_path, capsys):
    _, checkpoint = make_checkpoint()
    before = sorted(tmp_path.iterdir())
    run("engine=vllm", f"checkpoint={checkpoint.parent}")
    printed = capsys.readouterr().out
    assert f"export: {checkpoint.parent / 'export-vllm'}\n" in printed
    assert "Serving with vllm" in printed and '"draft_sample_method": "probabilistic"' in printed
    assert (checkpoint.parent / "export-vllm" / "model.safetensors").is_file()
    assert sorted(tmp_path.iterdir()) == before  # no run directory, no log


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_the_engine_is_told_the_whole_path(run, make_checkpoint, tmp_path, capsys, engine):
    """It may be started elsewhere than the export was."""
    _, checkpoint = make_checkpoint()
    run(f"engine={engine}", f"checkpoint={checkpoint.relative_to(tmp_path)}")
    printed = capsys.readouterr().out
    directory = checkpoint.relative_to(tmp_path).parent / f"export-{engine}"
    assert printed.startswith(f"export: {directory}\n") and str(tmp_path / directory) in printed


def test_the_checkout_that_is_called_comes_before_an_installed_package(tmp_path):
    (tmp_path / "specdraft").mkdir()
    (tmp_path / "specdraft" / "__init__.py").write_text("raise SystemExit('another specdraft')")
    command = [sys.executable, str(REPOSITORY / "export"), "--help"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0 and "engine=" in done.stdout, done.stderr


def test_overrides(run, make_checkpoint, tmp_path, capsys):
    _, checkpoint = make_checkpoint()
    run(f"checkpoint={checkpoint}", "engine=sglang", "engine.dtype=bfloat16", f"output={tmp_path / 'served'}")
    printed = capsys.readouterr().out
    assert printed.startswith(f"export: {tmp_path / 'served'}\n") and "sglang.launch_server" in printed
    card = (tmp_path / "served" / "README.md").read_text()
    assert "--speculative-algorithm EAGLE3" in card and "--dtype bfloat16" in card


def test_what_needs_no_training(run, tmp_path, capsys):
    run("drafter=suffix", "drafter.max_tree_depth=12", "target=tiny", "decoding.num_draft_tokens=7")
    printed = capsys.readouterr().out
    settings = tmp_path / "export-vllm" / "vllm.yaml"
    assert printed.startswith("export: export-vllm\n") and f"vllm serve --config {settings}\n" in printed
    assert '"num_speculative_tokens": 7' in printed and '"max_tree_depth": 12' in printed
    assert printed.endswith("of the others alone.\n")


def test_options_that_the_template_names(run, tmp_path, capsys):
    """The embedded target's template names few words, this one among them."""
    run("drafter=suffix", "target=tiny", "target.chat_template_options={bos_token: '<s>'}")
    assert "default-chat-template-kwargs" in capsys.readouterr().out


def test_a_draft_model_that_ends_early(run, target, save, tmp_path, capsys):
    checkpoint = save(DraftModel.for_target(target))
    run(f"checkpoint={checkpoint}", "drafter@retrieval=prompt_lookup", "decoding/shape=entropy_chain", "output=here")
    printed = capsys.readouterr().out
    assert "EntropyBound" in printed and "PromptLookup" in printed and '"num_speculative_tokens": 4' in printed
    assert (tmp_path / "here" / "drafter" / "model.safetensors").is_file()


def test_help(run, capsys):
    with pytest.raises(SystemExit) as status:
        run("--help")
    assert not status.value.code
    assert "specdraft export checkpoint=" in capsys.readouterr().out


def test_bad_input(run, make_checkpoint, tmp_path, capsys):
    _, checkpoint = make_checkpoint()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (damaged / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:900])
    (tmp_path / "file").write_text("")
    cases = {
        (): "checkpoint= is missing",
        (f"checkpoint={tmp_path / 'none'}",): "there is no drafter checkpoint",
        (f"checkpoint={damaged}",): "is damaged",
        (f"checkpoint={checkpoint}", "engine=ollama"): "unknown engine 'ollama'",
        ("drafter=suffix",): "target= is missing",
        ("drafter=suffix", "target=tiny", f"checkpoint={checkpoint}"): "expected one of the two",
        ("drafter@retrieval=suffix", "target=tiny"): "expected one of the two",
        ("drafter=suffix", "target=tiny", "decoding.num_draft_tokens=auto"): "num_draft_tokens is auto: expected at",
        ("drafter=suffix", "target=tiny", "decoding.num_draft_tokens=0"): "num_draft_tokens is 0: expected at least 1",
        ("drafter=suffix", "target=tiny", "engine=sglang"): "but engine=sglang is given",
        ("drafter=suffix", "target=tiny", "quantize=int8"): "but quantize=int8 is given",
        ("drafter=suffix", "target=tiny", "engine.dtype=bfloat16"): "but engine.dtype=bfloat16 is given",
        ("drafter=suffix", "target=tiny", "target.chat_template_options={thinking: false}"): "no option 'thinking'",
        ("drafter=suffix", "target=tiny", "target.chat_template_options=[thinking]"): "expected names and values",
        ("drafter=suffix", "target=tiny", "decoding/shape=dynamic_tree"): "vLLM verifies chains",
        (f"checkpoint={checkpoint}", "decoding/shape=entropy_chain"): "eagle3 does not draft from tokens alone",
        (f"checkpoint={checkpoint}", "engine.dtype=int8"): "engine.dtype is 'int8'",
        (f"checkpoint={checkpoint}", "quantize=int5"): "quantize is 'int5'",
        (f"checkpoint={checkpoint}", "outptu=x"): "unknown config key 'outptu'",
        (f"checkpoint={checkpoint}", f"output={tmp_path / 'file' / 'x'}"): "cannot write to the directory",
        (f"checkpoint={checkpoint}", f"output={tmp_path / 'file'}"): "is not an earlier export",
    }
    for overrides, expected in cases.items():
        with pytest.raises(SystemExit) as status:
            run(*overrides)
        printed = capsys.readouterr().err
        assert status.value.code == 2, overrides
        errors = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and expected in errors[0] and "Traceback" not in printed, printed
        assert not (tmp_path / "export-vllm").exists()


@pytest.mark.parametrize("given", ["target=llama-8b", "decoding.num_draft_tokens=8"])
def test_what_the_weights_do_not_ask_for_is_refused(run, make_checkpoint, capsys, given):
    _, checkpoint = make_checkpoint()
    with pytest.raises(SystemExit):
        run(f"checkpoint={checkpoint}", given)
    said = capsys.readouterr().err
    assert "does not go with the weights of checkpoint=" in said and "with drafter= or decoding/shape= alone" in said
    assert not list(checkpoint.parent.glob("export-*"))
