"""What commands share: errors and their sentences, exit statuses, and plans that leave nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_command import SCRIPT, call


@pytest.mark.parametrize(
    ("task", "options", "read", "status", "said"),
    [
        ("print(1)", [], False, 141, ""),
        ("print(1)", ["--help"], False, 141, ""),
        ("print(1)", [], True, 0, ""),
        ("raise BrokenPipeError('a connection')", [], True, 1, "BrokenPipeError: a connection"),
    ],
)
def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path, task, options, read, status, said):
    (tmp_path / "conf.yaml").write_text("imports: []")
    (tmp_path / "script.py").write_text(SCRIPT.format(task=task))
    command = [sys.executable, "script.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        if not read:
            process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == status, errors
    assert said in errors if said else errors == ""


def test_a_sweep_is_asked_for_anywhere_among_the_overrides(tmp_path: Path):
    done = call(tmp_path, "plan=false", "-m", "number=1,2", "more.deep=true")
    assert done.returncode == 0 and "unrecognized" not in done.stderr, done.stderr


@pytest.mark.parametrize("options", [["plan=true"], ["++plan=True", "number=1,2", "-m"]])
def test_a_plan_leaves_no_directory_behind(tmp_path: Path, options):
    before = tmp_path / "runs" / "now"
    before.mkdir(parents=True)
    (before / "kept").touch()
    done = call(tmp_path, *options)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] in ("1", "2"), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf.yaml", "runs", "script.py"]
    assert [path.name for path in (tmp_path / "runs").rglob("*")] == ["now", "kept"]


def test_a_run_keeps_its_directory(tmp_path: Path):
    assert call(tmp_path, "plan=false").returncode == 0
    assert (tmp_path / "runs" / "now" / ".hydra" / "overrides.yaml").read_text() == "- plan=false\n"


def test_a_run_directory_that_cannot_be_made_is_named_with_its_option(tmp_path: Path):
    (tmp_path / "runs").touch()
    done = call(tmp_path)
    wrong = rf"error: cannot make the run directory {tmp_path}/runs.* \(.+\): choose .* hydra.run.dir=DIR"
    assert done.returncode == 2 and re.match(wrong, done.stderr), done.stderr


def test_what_the_task_returns_reaches_a_sweeper(tmp_path: Path):
    """Hydra's own sweeper keeps what every job returned in the results that a callback is given."""
    (tmp_path / "seen.py").write_text(
        "from hydra.experimental.callback import Callback\n"
        "class Seen(Callback):\n"
        "    def on_job_end(self, config, job_return, **_):\n"
        "        print('returned', job_return.return_value)\n"
    )
    done = call(tmp_path, "+hydra.callbacks.seen._target_=seen.Seen", task="return 10 * config.number")
    assert "returned 10" in done.stdout, done.stderr


def test_a_full_disk_is_one_sentence(tmp_path: Path):
    done = call(tmp_path, task='Path("/dev/full").write_text("more")')
    said = "a file cannot be written (No space left on device): free some space or choose another place"
    assert done.returncode == 2 and done.stderr == f"error: {said}\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["numbr=2"], "unknown config key 'numbr': did you mean number?"),
        (["number=1,2"], "number has several values: add -m to run with each of them, or write number=[1,2]"),
        (["number=~/x"], """cannot read number=~/x: expected its value in quotes within quotes, as 'number="~/x"'"""),
        (["runs/mine"], "cannot read 'runs/mine': expected NAME=VALUE, as checkpoint=PATH; --help shows the names"),
        (["+api_key=sk-123456789"], "api_key holds a secret in plain text: expected it in an environment variable"),
        (["plan=maybe"], "plan is maybe: expected true or false"),
        (["plan=1"], "plan is 1: expected true or false"),
        (["plan=null"], "plan is null: expected true or false"),
        (["more.deep=no"], "more.deep is no: expected true or false"),
        (["imports=[nowhere]"], "imports=['nowhere']: No module named 'nowhere'; expected Python modules"),
        (["imports=nowhere"], "imports=['nowhere']: No module named 'nowhere'; expected Python modules"),
    ],
)
def test_errors_say_how_to_mend_them(tmp_path: Path, options, sentence):
    done = call(tmp_path, *options)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {sentence}"), done.stderr
    assert "sk-123456789" not in done.stderr
    assert not list(tmp_path.rglob("overrides.yaml")) or "sk-" not in next(tmp_path.rglob("overrides.yaml")).read_text()
