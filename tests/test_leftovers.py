"""What a command that ends early leaves behind: what was there before, and what is of worth."""

from pathlib import Path

import pytest

from tests.small_command import call


@pytest.mark.parametrize(
    ("error", "options"),
    [
        ("KeyboardInterrupt", []),
        ("ValueError", []),
        ("KeyboardInterrupt", ["hydra.output_subdir=null"]),
        ("ValueError", ["hydra.run.dir=."]),
    ],
)
def test_a_run_that_ends_before_it_has_written_anything_leaves_no_directory(tmp_path: Path, error, options):
    done = call(tmp_path, "hydra/job_logging=none", *options, task=f"raise {error}")  # its default has a log file
    assert done.returncode != 0
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} - {"runs"}
    assert {path for path in there if not path.startswith(".hydra")} == {"conf.yaml", "script.py"}


@pytest.mark.parametrize("option", ["hydra.run.dir=more/deep/run", "hydra.sweep.dir=more/deep/sweep"])
def test_what_is_refused_leaves_nothing_that_it_made(tmp_path: Path, option):
    """Whatever has come of a run's own lock, of a sweep's file, and of directories around both."""
    locked = "Path(HydraConfig.get().runtime.output_dir, LOCK).write_text(owner()); raise UserError('no')"
    sweep = ["number=1,2", "-m"] if "sweep" in option else []
    done = call(tmp_path, "hydra/job_logging=none", option, *sweep, task=locked)
    assert done.returncode == 2 and done.stderr == "error: no\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf.yaml", "script.py"]


@pytest.mark.parametrize(
    ("held", "option"),
    [
        ([], "hydra.run.dir=kept"),
        ([".hydra"], "hydra.run.dir=kept"),
        (["multirun.yaml"], "hydra.sweep.dir=kept"),
        (["1"], "hydra.sweep.dir=kept"),
    ],
)
def test_what_was_there_before_is_left_as_it_was(tmp_path: Path, held, option):
    for name in ["", *held]:
        (tmp_path / "kept" / name).mkdir() if "." not in name[1:] else (tmp_path / "kept" / name).touch()
    sweep = ["number=1,2", "-m"] if "sweep" in option else []
    assert call(tmp_path, "hydra/job_logging=none", option, *sweep, task="raise UserError('no')").returncode == 2
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == held


def test_the_lock_of_another_process_is_not_removed(tmp_path: Path):
    """It began between our look at the directory and our refusal."""
    locked = "Path('runs/now/.lock').write_text('1 on another machine'); raise UserError('no')"
    assert call(tmp_path, "hydra/job_logging=none", task=locked).returncode == 2
    assert {path.name for path in (tmp_path / "runs" / "now").iterdir()} == {".hydra", ".lock"}


def test_jobs_before_a_refused_one_are_kept(tmp_path: Path):
    task = "Path(HydraConfig.get().runtime.output_dir, 'result').touch() if config.number < 3 else sys.exit(2)"
    assert call(tmp_path, "hydra/job_logging=none", "number=1,2,3,4", "-m", task=task).returncode == 2
    assert sorted(path.name for path in (tmp_path / "runs" / "swept").iterdir()) == ["0", "1", "multirun.yaml"]


def test_a_sweep_that_cannot_be_composed_leaves_nothing(tmp_path: Path):
    assert call(tmp_path, "hydra/job_logging=none", "number=1,2", "more.deeper=1", "-m").returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf.yaml", "script.py"]


def test_what_an_interrupted_run_has_written_is_kept(tmp_path: Path):
    written = "Path('runs/now/.part').touch(); raise KeyboardInterrupt"
    assert call(tmp_path, "hydra/job_logging=none", task=written).returncode == 130
    assert {path.name for path in (tmp_path / "runs" / "now").iterdir()} == {".hydra", ".part"}
