"""``specdraft COMMAND``: finds the command, and works where it is installed without a checkout."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from specdraft import cli

REPOSITORY = Path(__file__).parents[1]


def run(*words: str, cwd: Path, path: Path = REPOSITORY, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """``python -m specdraft`` of the package that lies in ``path``."""
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "specdraft", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_every_command_has_a_module():
    modules = {path.stem for path in (REPOSITORY / "specdraft" / "commands").glob("*.py")} - {"__init__"}
    assert {module for module, _ in cli.COMMANDS.values()} == modules


def test_help_is_there_at_once(tmp_path):
    script = "import sys; sys.argv = ['specdraft', '--help']; from specdraft.cli import main; main(); "
    script += "assert not {'torch', 'hydra', 'lightning', 'transformers'} & set(sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in cli.COMMANDS)


def test_an_unknown_command_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["specdraft", "trian", "target=tiny"])
    with pytest.raises(SystemExit) as status:
        cli.main()
    assert status.value.code == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'trian': did you mean train?")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_command_gets_the_words_after_it(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specdraft", command, "seed=1", "--help"])
    ran = []
    monkeypatch.setattr(runpy, "run_module", lambda *args, **options: ran.append((args, options, sys.argv[1:])))
    cli.main()
    ((name,), options, words) = ran[0]
    assert name == f"specdraft.commands.{cli.COMMANDS[command][0]}" and words == ["seed=1", "--help"]
    # Lightning and multiprocessing start the main module again by its name.
    assert options == {"run_name": "__main__", "alter_sys": True}


def test_it_runs_in_another_directory(tmp_path):
    done = run("export", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "Write a trained drafter" in done.stdout, done.stderr
    done = run("export", "nonsense=1", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown config key 'nonsense'")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the installed wheel, beside no checkout."""
    folder = tmp_path_factory.mktemp("installed")
    # A copy, because building leaves files beside the sources.
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "specdraft", "conf", "*.*", "LICENSE"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for file in files:
        if (REPOSITORY / file).is_file():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_bytes((REPOSITORY / file).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_works_without_a_checkout(site, tmp_path):
    done = run("train", "model=medusa", "target=qwen3-8b", "plan=true", cwd=tmp_path, path=site)
    assert done.returncode == 0 and "10,000 steps x 65,536 tokens" in done.stdout, done.stderr
    for command in cli.COMMANDS:
        done = run(command, "--help", cwd=tmp_path, path=site)
        assert done.returncode == 0 and f"specdraft {command}" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []
    script = (site / "bin" / "specdraft").read_text()
    assert "from specdraft.cli import main" in script


@pytest.mark.slow
def test_two_ranks_train_without_a_checkout(site, tmp_path):
    note = "import os, pathlib\npathlib.Path('rank-' + os.environ.get('LOCAL_RANK', '0')).touch()\n"
    (tmp_path / "ranks.py").write_text(note)
    done = run(
        "train", "imports=[ranks]", "trainer.accelerator=cpu", "trainer.devices=2", "strategy=ddp",
        "trainer.max_steps=4", "evaluate=false", "data.regenerate=false", "data.limit=48", "data.validation_limit=8",
        "data.num_proc=1", "live.prompts=2", "live.max_new_tokens=8", f"data.cache_dir={tmp_path / 'cache'}",
        f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path, path=site, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"rank-0", "rank-1"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "run" / "drafter" / "config.json").is_file()
    assert (tmp_path / "run" / "export-vllm" / "config.json").is_file()
