"""What entry points do with errors that are nobody's fault."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from pathlib import Path
from specdraft.entry import entry_point

@entry_point(Path(__file__).parent, "conf")
def main(config):
    {task}

main()
"""


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
