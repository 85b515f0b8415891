"""``python train.py`` itself on two ranks, killed once and resumed, for every family: it ends as if left alone.

``python benchmarks/killed_command.py``: 200 steps under DeepSpeed ZeRO-3 with the default data, each family twice: left
alone, and killed with SIGKILL (both ranks at once) somewhere behind its first checkpoint, then continued with
``resume=auto``. The losses of all steps after the kill and the weights of the last checkpoint are compared.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from common import REPOSITORY, print_table, write_result

FAMILIES = ("draft", "medusa", "hydra", "eagle", "eagle3", "eagle3_1")


def command(family: str, runs: Path, options: argparse.Namespace, *more: str) -> list[str]:
    """The user's own command."""
    return [
        sys.executable,
        "train.py",
        f"model={family}",
        f"strategy={options.strategy}",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        f"trainer.max_steps={options.steps}",
        "trainer.log_every_n_steps=1",
        f"checkpoint.every_n_steps={options.every}",
        "evaluate=false",
        "export=null",
        f"run_family={runs}",
        *more,
    ]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that a kill meets every rank."""
    with log.open("ab") as file:
        return subprocess.Popen(arguments, cwd=REPOSITORY, stdout=file, stderr=file, start_new_session=True)


def finish(process: subprocess.Popen[bytes], log: Path, limit: float) -> None:
    """Wait for its end; whatever is not a success ends the benchmark with the run's last words."""
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = -1  # not within the limit
    if status != 0:
        sys.exit(f"exit status {status}: {log.read_text(errors='replace')[-2000:]}")


def newest(runs: Path) -> Path | None:
    """The checkpoint of the latest step."""
    found = sorted(runs.glob("*/checkpoints/step-*.ckpt"), key=lambda path: path.name)
    return found[-1] if found else None


def losses(run: Path) -> dict[int, float]:
    """The training loss of every step that ``run`` has written down."""
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        return {int(line["step"]): float(line["train/loss"]) for line in csv.DictReader(file) if line["train/loss"]}


def measure(family: str, folder: Path, options: argparse.Namespace, chance: random.Random) -> dict[str, Any]:
    """Left alone, then killed and resumed."""
    alone, killed = folder / "alone", folder / "killed"
    for runs in (alone, killed):
        runs.mkdir(parents=True)
    began = time.monotonic()
    log = alone / "log"
    finish(start(command(family, alone, options, f"hydra.run.dir={alone / 'run'}"), log), log, options.limit)
    seconds = time.monotonic() - began

    log = killed / "log"
    process = start(command(family, killed, options, f"hydra.run.dir={killed / 'first'}"), log)
    deadline = time.monotonic() + options.limit
    while newest(killed) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(chance.uniform(0, 0.4 * seconds * (options.steps - options.every) / options.steps))
    if process.poll() is not None:
        sys.exit(f"{family} ended before it was killed: {log.read_text(errors='replace')[-2000:]}")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = losses(killed / "first")
    again = command(family, killed, options, f"hydra.run.dir={killed / 'second'}", "resume=auto")
    finish(start(again, log), log, options.limit)

    left_alone, resumed = losses(alone / "run"), losses(killed / "second")
    ours, theirs = (torch.load(newest(runs), weights_only=True) for runs in (killed, alone))  # type: ignore[arg-type]
    differences = [
        float((ours["state_dict"][name].float() - value.float()).abs().max())
        for name, value in theirs["state_dict"].items()
        if value.is_floating_point()
    ]
    return {
        "family": family,
        "steps": ours["global_step"],
        "killed_at": max(before, default=0),
        "loss_first": left_alone[min(left_alone)],
        "loss_last": left_alone[max(left_alone)],
        "largest_loss_difference": max(abs(resumed[step] - left_alone[step]) for step in resumed),
        "largest_weight_difference": max(differences),
        "seconds_alone": round(seconds, 1),
    }


def main() -> None:
    """All families; exit status 1 if one does not end as if left alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--strategy", default="deepspeed_zero3")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that a run may take")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference of losses and weights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for family in options.families:
            found.append(measure(family, Path(folder, family), options, chance))
            print(found[-1], flush=True)
    header = tuple(found[0])
    print_table(
        header,
        [
            tuple(f"{value:.3g}" if isinstance(value, float) else str(value) for value in each.values())
            for each in found
        ],
    )
    equal = all(
        each["steps"] == options.steps
        and max(each["largest_loss_difference"], each["largest_weight_difference"]) <= options.tolerance
        for each in found
    )
    print(write_result("killed_command", vars(options), {"ends_as_if_left_alone": equal, "families": found}))
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
