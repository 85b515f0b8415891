"""A command of one configuration and one line, run as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from hydra.core.hydra_config import HydraConfig
from specdraft.entry import entry_point
from specdraft.errors import UserError
from specdraft.leftovers import LOCK, owner

@entry_point(Path(__file__).parent, "conf")
def main(config):
    {task}

main()
"""


def call(folder: Path, *options: str, task: str = "print(config.number)") -> subprocess.CompletedProcess[str]:
    (folder / "conf.yaml").write_text(
        "imports: []\nplan: false\nnumber: 1\nmore: {deep: true}\n"
        "hydra: {run: {dir: runs/now}, sweep: {dir: runs/swept}}\n"
    )
    (folder / "script.py").write_text(SCRIPT.format(task=task))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "script.py", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
