"""What OpenMP reads as torch is loaded, in every command, benchmark and test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdraft import threads

REPOSITORY = Path(__file__).parents[1]
# Python imports this before anything else: it ends the process where torch is imported first.
HOOK = """
import os, sys
from importlib.abc import MetaPathFinder

class Torch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch sees", os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch())
"""
COMMANDS = [
    ["train.py", "plan=true"],
    ["train.py", "trainer.max_steps=1"],
    ["evaluate.py", "checkpoint=nowhere"],
    ["export", "checkpoint=nowhere"],
    ["-m", "specdraft", "doctor", "checkpoint=nowhere"],
    ["-m", "specdraft", "store", "data.store=nowhere"],
    ["-m", "specdraft", "regenerate"],
    ["-m", "pytest", "-s", "tests/losses"],
    ["docs/plans.py"],
]
WITHOUT_US = {"step_worker.py", "common.py"}  # which get the variable from what starts them
SCRIPTS = [
    path.relative_to(REPOSITORY)
    for folder in ("benchmarks", "tests/parity")
    for path in sorted((REPOSITORY / folder).glob("*.py"))
    if path.name not in WITHOUT_US and "__main__" in path.read_text() and "torch" in path.read_text()
]


def seen(command: list[str], tmp_path: Path, **chosen: str) -> str:
    """What the command prints as it imports torch."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    environment = {name: value for name, value in os.environ.items() if name not in threads.CHOICES}
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)]), **chosen}
    command = [sys.executable, *command, *([f"hydra.run.dir={tmp_path}"] if "=" in command[-1] else [])]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_set_the_policy(command, tmp_path):
    assert seen(command, tmp_path).endswith("torch sees PASSIVE 1000\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_so_has_every_script(script, tmp_path):
    said = seen([str(script), "--help"], tmp_path)
    assert said == "torch sees PASSIVE 1000\n" or said.startswith("usage: ")  # its workers load torch, and inherit


@pytest.mark.parametrize(
    ("chosen", "policy"),
    [
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "10"}, "None 10"),
        ({"KMP_BLOCKTIME": "1"}, "None None"),
    ],
)
def test_a_choice_of_the_user_stays(chosen, policy, tmp_path):
    assert seen(["train.py", "plan=true"], tmp_path, **chosen) == f"torch sees {policy}\n"


def test_so_it_is_in_these_tests():
    assert any(name in os.environ for name in threads.CHOICES)
