"""The planner's tokens per second beside those of the same run, on this CPU: ``python benchmarks/plan_throughput.py``.

What the machine can do is measured first, as no data sheet says it: the rate of a large product, and of a copy. The
planner then reckons with a device of these figures and ``--utilization`` 1, and each family trains in shapes of its own
on a random target. Plan and run take turns, so that a busy neighbor slows both.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import Callback

from common import alternate, print_table, write_result
from plan_memory import Batches, architecture_of, composed, train
from specdraft.training.planning.gpus import GPUS, Gpu
from specdraft.training.planning.plan import make_plan

SHAPES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "EAGLE-3, hidden 512": ("eagle3", {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536,
                                       "num_hidden_layers": 6, "heads": 8}, 2, 256),
    "EAGLE-3, hidden 1,024": ("eagle3", {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 2816,
                                         "num_hidden_layers": 4, "heads": 16}, 1, 256),
    "Medusa, hidden 512": ("medusa", {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536,
                                      "num_hidden_layers": 6, "heads": 8}, 2, 256),
}  # fmt: skip
WARM_UP = 2


class Clock(Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """One more."""
        self.ends.append(time.perf_counter())


def rate(work: float, call: Callable[[], object], repeats: int = 7) -> float:
    """``work`` per second, the median of some calls."""
    call()
    spent = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        spent.append(time.perf_counter() - started)
    return work / statistics.median(spent)


def probe() -> Gpu:
    """This machine: FLOP/s of a product of 2,048, bytes/s read and written by a copy that no cache holds."""
    a, b = torch.randn(2, 2048, 2048).unbind()
    source = torch.randn(2**25)
    copy = torch.empty_like(source)
    flops = rate(2.0 * 2048**3, lambda: torch.mm(a, b))
    bandwidth = rate(2.0 * source.nbytes, lambda: copy.copy_(source))
    return Gpu(flops, 1e12, bandwidth, bandwidth, bandwidth)


def planned(name: str, utilization: float) -> float:
    """Tokens per second of the plan, by what the machine can do now."""
    family, shape, rows, length = SHAPES[name]
    config = composed(family, "cpu", rows, length)
    GPUS["here"] = probe()
    config.planning.gpu, config.planning.gpus, config.planning.utilization = "here", 1, utilization
    return make_plan(config, architecture_of(shape), "random").tokens_per_second


def measured(name: str, steps: int) -> float:
    """Tokens per second of the run, the median of its steps."""
    family, shape, rows, length = SHAPES[name]
    clock = Clock()
    data = Batches(shape["vocab_size"], rows, length, steps + WARM_UP)
    train(composed(family, "cpu", rows, length), architecture_of(shape), "cpu", data, [clock])
    return rows * length / statistics.median(b - a for a, b in itertools.pairwise(clock.ends[WARM_UP - 1 :]))


def main() -> None:
    """Measure, print, and record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--utilization", type=float, default=1.0)
    parser.add_argument("--record", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in SHAPES:
        runs = {
            "planned": partial(planned, name, options.utilization),
            "measured": partial(measured, name, options.steps),
        }
        rates = alternate(runs, options.rounds)
        factors = [plan / run for plan, run in zip(rates["planned"], rates["measured"], strict=True)]
        found.append({"shape": name, **rates, "factor": statistics.median(factors)})
    print_table(
        ("tokens/s", "planned", "measured", "planned / measured"),
        [
            (
                line["shape"],
                f"{statistics.median(line['planned']):,.0f}",
                f"{statistics.median(line['measured']):,.0f}",
                f"{line['factor']:.2f}",
            )
            for line in found
        ],
    )
    if options.record:
        settings = {**vars(options), "threads": torch.get_num_threads(), "shapes": SHAPES}
        print(write_result("plan_throughput", settings, {"shapes": found}))


if __name__ == "__main__":
    main()
