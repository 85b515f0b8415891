"""A training beside a busy neighbor: the time of ``train.py`` alone and beside one process that keeps a core busy.

``python benchmarks/busy.py [--rounds 3] [--steps 100] [OVERRIDE ...]``. With threads that soon give their core away,
as every command sets it (specdraft/threads.py), with threads that do so at once, and with OpenMP's own choice, which is
to spin and takes long: ``--policy ours`` leaves the others out. The cases take turns. The time is that of the whole
command, with the loading of torch and of the data, which a first run has put into the cache.
"""

import specdraft.threads  # noqa: F401  # first of all
from specdraft.threads import CHOICES, OURS

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from common import REPOSITORY, alternate, median_ratio, print_table, scratch, write_result
from specdraft.errors import UserError, exit_on_user_error

POLICIES = {
    "ours": OURS,
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},  # not to spin at all
    "OpenMP's own": {"GOMP_SPINCOUNT": "300000"},  # libgomp's number where no policy is set
}


@contextmanager
def neighbor() -> Iterator[None]:
    """One process that does nothing else than to count."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds(folder: Path, overrides: list[str], policy: str, busy: bool) -> float:
    """Of one training. Raises UserError with what it said if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES} | POLICIES[policy]
    command = [sys.executable, "train.py", *overrides, f"hydra.run.dir={folder / str(time.monotonic_ns())}"]
    with neighbor() if busy else nullcontext():
        started = time.perf_counter()
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        took = time.perf_counter() - started
    if done.returncode:
        raise UserError(f"train.py ended with status {done.returncode}: {done.stderr[-500:]}")
    print(f"{policy}, {'beside a busy process' if busy else 'alone'}: {took:.1f} s", flush=True)
    return took


@exit_on_user_error
def main() -> None:
    """Parse options, run the four cases in turn, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of training (default 100)")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="one of them, or some (default: all)")
    parser.add_argument("overrides", nargs="*", help="more of train.py's settings")
    arguments = parser.parse_args()

    policies = arguments.policy or list(POLICIES)
    overrides = [f"trainer.max_steps={arguments.steps}", "trainer=cpu", *arguments.overrides]
    with scratch() as name:
        run = partial(seconds, Path(name), overrides)
        run("ours", False)  # prepares the data
        cases = {
            f"{policy}, {'busy' if busy else 'idle'}": partial(run, policy, busy)
            for policy in policies
            for busy in (False, True)
        }
        found = alternate(cases, arguments.rounds)
    result, rows = {}, []
    for policy in policies:
        idle, busy = (found[f"{policy}, {load}"] for load in ("idle", "busy"))
        ratio = median_ratio(busy, idle)
        result[policy] = {"idle_seconds": idle, "busy_seconds": busy, "busy_over_idle": ratio}
        rows.append([policy, *(" ".join(f"{each:.1f}" for each in times) for times in (idle, busy)), f"{ratio:.2f}x"])
    print_table(["threads that wait", "alone, s", "beside a busy process, s", "ratio"], rows)
    print(f"\nwritten to {write_result('busy', vars(arguments), result)}")


if __name__ == "__main__":
    main()
