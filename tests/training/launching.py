"""Start a script as two ranks over gloo, as torchrun would, without torchrun's own seconds."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def start(script: Path, output: Path, *arguments: str) -> list[subprocess.Popen]:
    """The two processes. What they say goes to ``output/rank-N.log``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, str(script), str(output), *arguments]
        with (output / f"rank-{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return ranks


def said(output: Path) -> list[str]:
    """What each rank has said."""
    return [(output / f"rank-{rank}.log").read_text(errors="replace") for rank in range(2)]


def launch(script: Path, output: Path, *arguments: str) -> None:
    """Run the script to its end; what a failing rank said is shown."""
    ranks = start(script, output, *arguments)
    try:
        while None in (codes := [process.poll() for process in ranks]) and not any(codes):
            time.sleep(0.05)  # one that has failed would leave the other waiting
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(text[-3000:] for text in said(output))
