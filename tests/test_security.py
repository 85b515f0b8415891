"""Nothing from outside is executed, followed out of its folder, or believed to be small; no secret is written down."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from specdraft.export.importing import import_head
from specdraft.targets import Target
from specdraft.targets.loading import check_files, location
from tests.fakes import tiny_llama

SECRET = "sk-0123456789abcdef"


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(tiny_llama())


@pytest.fixture
def checkpoint(target, tmp_path) -> Path:
    return save_drafter(Medusa.for_target(target, num_heads=1), tmp_path / "run" / "drafter", target.identity)


def edit(checkpoint: Path, **drafter: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["drafter"] |= drafter
    (checkpoint / "config.json").write_text(json.dumps(config))


# --- pickles and code -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt", "head.pth", "head.ckpt"])
def test_a_pickled_head_is_refused_and_read_when_converted_as_told(target, tmp_path, name, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} is a pickle, ") as refused:
        import_head(tmp_path, target)
    monkeypatch.chdir(tmp_path)
    eval(str(refused.value).split("`")[1], {"safetensors": safetensors, "torch": torch})
    with pytest.raises(UserError, match="hidden_size is None"):
        import_head(tmp_path, target)


def test_a_pickled_target_is_refused(tmp_path):
    model = tiny_llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot load the target .*safetensors"):
        Target.load(str(tmp_path), device="cpu")


def test_a_configuration_with_code_of_its_own_runs_none(tmp_path):
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="contains custom code"):
        Target.load(str(tmp_path), device="cpu")
    assert not (tmp_path / "ran").exists()


# --- paths ------------------------------------------------------------------------------------------------------------


def test_an_index_of_weights_that_leads_out_of_the_folder(tmp_path):
    tiny_llama().config.save_pretrained(tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    for file in ("../weights.safetensors", "/weights.safetensors"):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
        with pytest.raises(UserError, match="lies elsewhere"):
            check_files(str(tmp_path / "model"), None)


def test_weights_of_a_checkpoint_that_are_a_link(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.rename(checkpoint.parent / "elsewhere")
    weights.symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(UserError, match="lies elsewhere"):
        load_drafter(checkpoint)


def test_an_embedded_name_leads_nowhere_else():
    with pytest.raises(UserError, match="no embedded target"):
        location("embedded://tiny/../tiny")


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 10**9}, "does not fit Medusa .*by the configuration"),
        ({"num_heads": 1000}, "more than .* weights"),
        ({"num_layers": 10**9}, "num_layers=1e[+]09"),
        ({"vocab_size": 10**30}, "vocab_size=1e[+]30"),
    ],
)
def test_a_configuration_larger_than_its_file_is_refused_before_it_is_built(checkpoint, change, reason):
    edit(checkpoint, **change)
    with pytest.raises(UserError, match=reason):
        load_drafter(checkpoint)


def test_a_draft_vocabulary_that_points_outside(target, tmp_path):
    drafter = Medusa.for_target(target, torch.arange(0, 64, 2), num_heads=1)
    directory = save_drafter(drafter, tmp_path / "drafter", target.identity)
    drafter.d2t += 100
    save_file(dict(drafter.state_dict()), directory / "model.safetensors")
    with pytest.raises(UserError, match="expected 32 ascending ids below 64"):
        load_drafter(directory)


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_with_a_drafter_holds_none(target, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    extra = {"data": {"source": f"hf://user:{SECRET}@data"}, "training": {"wandb_api_key": "another secret"}}
    directory = save_drafter(Medusa.for_target(target, num_heads=1), tmp_path / "drafter", target.identity, extra)
    written = (directory / "config.json").read_text()
    assert "hf://user:***@data" in written and SECRET not in written and "another" not in written


ENTRY = """
import sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from specdraft.entry import entry_point

@entry_point(Path({conf!r}), "main")
def main(config):
    raise AssertionError("nothing may start")

main()
"""


def test_a_secret_on_the_command_line_is_refused_and_not_kept(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "main.yaml").write_text("imports: []\nhydra: {run: {dir: run}}\n")
    code = ENTRY.format(repository=str(Path(__file__).parents[1]), conf=str(tmp_path / "conf"))
    command = [sys.executable, "-c", code, f"+server.api_key={SECRET}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "server.api_key holds a secret in plain text" in done.stderr and "oc.env" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET in path.read_text()]
