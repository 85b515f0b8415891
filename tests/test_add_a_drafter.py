"""docs/add-a-drafter.md: its two files, as they stand there, train, load from a checkpoint, and decode losslessly."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(workplace: Path, script: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SPECDRAFT_CACHE": str(workplace)}
    command = [sys.executable, str(REPOSITORY / script), *overrides]
    return subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def trained(workplace) -> Path:
    done = run(
        workplace,
        "train.py",
        f"hydra.searchpath=[file://{workplace}/conf]",
        "imports=[bigram]",
        "model=bigram",
        "export=null",
        f"hydra.run.dir={workplace}/run",
        "trainer.max_steps=30",
        "trainer.val_check_interval=30",
        "trainer.accelerator=cpu",
        "data.limit=24",
        "data.validation_limit=4",
        "data.regenerate=false",
        "data.batch_size=2",
        "data.sequence_length=256",
        "live.every_n_steps=30",
        "live.prompts=2",
        "live.max_new_tokens=12",
        "evaluation.limit=2",
        "evaluation.cost_model=null",
        "decoding.max_new_tokens=12",
        "compare=[]",
    )
    assert done.returncode == 0, done.stderr
    return workplace / "run"


def test_it_learns(trained):
    with (trained / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert losses[-1] < losses[0] - 1
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert evaluation["results"][0]["drafter"] == "bigram" and evaluation["results"][0]["lossless"]


def test_its_checkpoint_decodes_as_a_tree(workplace, trained):
    options = [f"checkpoint={trained}", "limit=2", "decoding.max_new_tokens=12", "compare=[]", "cost_model=null"]
    options += ["decoding/shape=dynamic_tree", f"hydra.run.dir={workplace}/evaluation"]
    done = run(workplace, "evaluate.py", "imports=[bigram]", *options)
    assert done.returncode == 0, done.stderr
    results = json.loads((workplace / "evaluation" / "evaluation.json").read_text())["results"]
    assert results[0]["lossless"] and results[0]["nodes_per_round"] > 5
    refused = run(workplace, "evaluate.py", *options)
    assert refused.returncode == 2 and "bigram.Bigram" in refused.stderr and "imports" in refused.stderr


def test_a_module_that_is_not_there(workplace):
    done = run(workplace, "evaluate.py", "imports=[trigram]", "checkpoint=x", f"hydra.run.dir={workplace}/none")
    assert done.returncode == 2
    assert done.stderr.startswith("error: imports=['trigram']: No module named 'trigram'; expected")
