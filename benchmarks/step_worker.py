"""One contender in a process of its own, driven over its standard input by ``train_step.py``.

``python benchmarks/step_worker.py CONTENDER SHAPE_JSON THREADS``: builds, answers with the memory of a step, then takes
one step for every line it reads. Answers are JSON lines.
"""

import ctypes
import gc
import importlib
import json
import sys
import time
from pathlib import Path

import torch

from contenders.problem import Shape, make_problem

WARM_UP_TOKENS = 160  # enough for ours to compile what it compiles


def status(key: str) -> float:
    """A size from /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1]) / 1024


def main() -> None:
    """Serve steps until standard input ends."""
    name, shape, threads = sys.argv[1], Shape(**json.loads(sys.argv[2])), int(sys.argv[3])
    torch.set_num_threads(threads)
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print; answers must stay clean
    module, _, option = name.partition("-")
    problem = make_problem(shape)
    options = {option: True} if option else {}
    contender = importlib.import_module(f"contenders.{module}").build(problem, **options)

    # A short step first: optimizer state, libraries' buffers and a compiler are not memory *of* a step.
    contender.step(problem.part(WARM_UP_TOKENS))
    contender.rewind()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    resident = status("VmRSS")
    loss = contender.step(problem)
    print(
        json.dumps({"loss": loss, "resident_mib": resident, "step_peak_mib": status("VmHWM") - resident}),
        file=answers,
        flush=True,
    )
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        loss = contender.step(problem)
        seconds = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps({"loss": loss, **seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
