"""docs/add-a-drafter.md: its two files, as they stand there, train, load from a checkpoint, and decode losslessly."""

import csv
import email
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from specdraft.commands import evaluate

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "add-a-drafter.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("mine")
    (directory / "conf" / "model").mkdir(parents=True)
    (directory / "bigram.py").write_text(block("python"))
    (directory / "conf" / "model" / "bigram.yaml").write_text(block("yaml"))
    return directory


@pytest.fixture
def run_evaluate(workplace, monkeypatch, capsys):
    """Run evaluate.py in this process, from the folder of the two files; gives (exit status, standard error)."""
    monkeypatch.chdir(workplace)

    def run(*overrides: str) -> tuple[int, str]:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *overrides])
        status = 0
        try:
            evaluate.main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        finally:
            sys.modules.pop("bigram", None)
        return status, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def trained(workplace) -> Path:
    prompt = {"prompt": 'def add(a, b):\n    """Add two numbers."""\n'}
    (workplace / "prompts.jsonl").write_text(f"{json.dumps(prompt)}\n" * 2)
    overrides = [
        f"hydra.searchpath=[file://{workplace}/conf]",
        "imports=[bigram]",
        "model=bigram",
        "export=null",
        f"hydra.run.dir={workplace}/run",
        "trainer.max_steps=30",
        "trainer.val_check_interval=30",
        "trainer.accelerator=cpu",
        f"+data.source.root={Path(email.__file__).parent}",  # a few files: reading the whole library takes seconds
        "data.limit=24",
        "data.validation_limit=4",
        "data.regenerate=false",
        "data.batch_size=2",
        "data.sequence_length=256",
        "live.every_n_steps=30",
        "live.prompts=2",
        "live.max_new_tokens=12",
        f"evaluation.benchmark={workplace / 'prompts.jsonl'}",
        "evaluation.cost_model=null",
        "decoding.max_new_tokens=12",
        "compare=[]",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SPECDRAFT_CACHE": str(workplace)}
    command = [sys.executable, str(REPOSITORY / "train.py"), *overrides]
    done = subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return workplace / "run"


def test_it_learns(trained):
    with (trained / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert losses[-1] < losses[0] - 1
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert evaluation["results"][0]["drafter"] == "bigram" and evaluation["results"][0]["lossless"]


def test_its_checkpoint_decodes_as_a_tree(workplace, trained, run_evaluate):
    options = [f"checkpoint={trained}", f"benchmark={workplace / 'prompts.jsonl'}", "decoding.max_new_tokens=12"]
    options += ["compare=[]", "cost_model=null", "decoding/shape=dynamic_tree", f"hydra.run.dir={workplace}/evaluation"]
    status, err = run_evaluate(*options)
    assert status == 2 and "bigram.Bigram" in err and "imports" in err
    status, err = run_evaluate("imports=[bigram]", *options)
    assert status == 0, err
    results = json.loads((workplace / "evaluation" / "evaluation.json").read_text())["results"]
    assert results[0]["lossless"] and results[0]["nodes_per_round"] > 5


def test_a_module_that_is_not_there(workplace, run_evaluate):
    status, err = run_evaluate("imports=[trigram]", "checkpoint=x", f"hydra.run.dir={workplace}/none")
    assert status == 2
    assert err.startswith("error: imports=['trigram']: No module named 'trigram'; expected")
