"""docs/add-a-drafter.md: its drafters, as they stand there, train, load from a checkpoint, and decode losslessly."""

import csv
import email
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from specdraft.commands import evaluate
from specdraft.decoding.passes import Pass
from specdraft.decoding.shapes import ForcedPath
from specdraft.drafters.alignment import align
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.drafters.alone import Alone
from tests.fakes import tiny_llama

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "add-a-drafter.md").read_text(encoding="utf-8")
NAMES = ("bigram", "rolling")


def blocks(language: str) -> dict[str, str]:
    return dict(zip(NAMES, re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL), strict=True))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("mine")
    (directory / "conf" / "model").mkdir(parents=True)
    for language, folder, suffix in (("python", directory, "py"), ("yaml", directory / "conf" / "model", "yaml")):
        for name, content in blocks(language).items():
            (folder / f"{name}.{suffix}").write_text(content)
    return directory


@pytest.fixture
def run_evaluate(workplace, monkeypatch, capsys):
    """Run evaluate.py in this process, from the folder of the files; gives (exit status, standard error)."""
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
            for name in NAMES:
                sys.modules.pop(name, None)
        return status, capsys.readouterr().err

    return run


@pytest.fixture(scope="module", params=NAMES)
def trained(request, workplace) -> Path:
    """The run directory, named by the drafter, of the real command."""
    prompt = {"prompt": 'def add(a, b):\n    """Add two numbers."""\n'}
    (workplace / "prompts.jsonl").write_text(f"{json.dumps(prompt)}\n" * 2)
    overrides = [
        f"hydra.searchpath=[file://{workplace}/conf]",
        f"imports=[{request.param}]",
        f"model={request.param}",
        "export=null",
        f"hydra.run.dir={workplace}/{request.param}",
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
        "decoding.num_draft_tokens=3",  # to find the best number takes as long as all else
        "compare=[]",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SPECDRAFT_CACHE": str(workplace)}
    command = [sys.executable, str(REPOSITORY / "train.py"), *overrides]
    done = subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    assert "data: 24 conversations to train on, 4 for validation" in done.stdout
    return workplace / request.param


def test_it_learns(trained):
    with (trained / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert losses[-1] < losses[0] - 1
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert evaluation["results"][0]["drafter"] == trained.name and evaluation["results"][0]["lossless"]


def test_its_checkpoint_decodes_as_a_tree(workplace, trained, run_evaluate):
    options = [f"checkpoint={trained}", f"benchmark={workplace / 'prompts.jsonl'}", "decoding.max_new_tokens=12"]
    options += ["compare=[]", "cost_model=null", "decoding/shape=dynamic_tree", f"hydra.run.dir={workplace}/evaluation"]
    status, err = run_evaluate(*options)
    assert status == 2 and f"{trained.name}.{trained.name.title()}" in err and "imports" in err
    status, err = run_evaluate(f"imports=[{trained.name}]", *options)
    assert status == 0, err
    results = json.loads((workplace / "evaluation" / "evaluation.json").read_text())["results"]
    assert results[0]["lossless"] and results[0]["nodes_per_round"] > 5


def test_rolling_is_trained_on_what_decoding_asks(workplace, monkeypatch):
    """At every step the most likely tokens of training are those of a draft that is made to follow the text."""
    monkeypatch.syspath_prepend(str(workplace))
    rolling = import_module("rolling")
    monkeypatch.delitem(sys.modules, "rolling")  # as it was before
    options = {"num_hidden_layers": 2, "initializer_range": 0.3, "tie_word_embeddings": False}
    target = Target.from_model(tiny_llama(97, 128, **options).double())
    drafter = rolling.Rolling.for_target(target, width=48).double()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens, mask = torch.randint(97, (1, 14)), torch.arange(14)[None] >= 4
    batch = Batch(tokens, torch.arange(14)[None], torch.zeros(1, 14, dtype=torch.int64), mask)
    compared = []
    real = rolling.objective

    def spy(weights, teacher, steps, kind):
        compared.extend(drafter.head(step.hidden) for step in steps)
        return real(weights, teacher, steps, kind)

    monkeypatch.setattr(rolling, "objective", spy)
    drafter.training_loss(batch, target.features(tokens, batch.position_ids, ()), target)
    text, checked = tokens[0].tolist(), 0
    for step, at in enumerate(align(batch, 3).supervised):
        for row, r in enumerate(at.tolist()):
            state = Alone(drafter, text[0])
            read = target.step(Pass.prompt(text[: r + 1], target.device), target.new_cache(1, 32))
            state.advance(tokens[0, 1 : r + 2], read)
            path = ForcedPath(torch.tensor([text[r + 2 : r + 3 + step]]), 5)
            assert torch.equal(state.draft(path).tokens[0, -5:], compared[step][row].topk(5).indices)
            checked += 1
    assert checked > 20


def test_a_module_that_is_not_there(workplace, run_evaluate):
    status, err = run_evaluate("imports=[trigram]", "checkpoint=x", f"hydra.run.dir={workplace}/none")
    assert status == 2
    assert err.startswith("error: imports=['trigram']: No module named 'trigram'; expected")
