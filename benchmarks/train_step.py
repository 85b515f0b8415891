"""A training step side by side: ours and speculators 0.9.0's own; of EAGLE-3 also ours on a sample of the positions
and a plain reference.

``python benchmarks/train_step.py [--family eagle3|p_eagle|dflash] [--speculators-python PATH]``. Every contender has a
process of its own, the same weights and the same data; steps are taken in turns. Reported: tokens per second of wall
clock and of processor time (medians), the memory that a step needs above what the process holds anyway (weights,
optimizer state, libraries), and the losses, which must agree to 1e-4 where the definitions do
(contenders/speculators.py says where they do not). Beside them the loss's matrix products alone take turns, each by the
fastest library of this machine: of EAGLE-3, where all tokens are supervised, the arithmetic of a contender's step over
its time is given as a share of that rate.

``make benchmark-peers`` makes the environment that ``--speculators-python`` names and runs this.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common import alternate, median_ratio, print_table, write_result
from contenders.problem import FAMILIES, HEAD_DIM, LAYERS, Shape
from specdraft.onednn import product

LOSS_TOLERANCE = 1e-4
DEFAULTS = {  # of a family's recipe, but for the steps of EAGLE-3
    "eagle3": {"num_layers": 1, "steps": 5},
    "p_eagle": {"num_layers": 4, "steps": 8},
    "dflash": {"num_layers": 5},
}


class Worker:
    """A contender's process."""

    def __init__(self, name: str, python: str, shape: Shape, threads: int) -> None:
        here = Path(__file__).parent
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",  # waiting contenders must not take the cores of the one that runs
            "HF_HUB_OFFLINE": "1",
        }
        command = [python, str(here / "step_worker.py"), name, json.dumps(asdict(shape)), str(threads)]
        self.name = name
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.memory = self._answer()
        self.steps: list[dict[str, float]] = []

    def step(self) -> float:
        """Take a step; returns its wall-clock seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.steps.append(self._answer())
        return self.steps[-1]["wall_seconds"]

    def close(self) -> None:
        """End the process."""
        self.process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, problems = self.process.communicate()
            sys.exit(f"error: the contender {self.name} failed:\n{problems[-2000:]}")
        return json.loads(line)


class Products:
    """The three matrix products of a window of the loss, without anything else."""

    def __init__(self, shape: Shape, rows: int = 256) -> None:
        hidden, weight = torch.randn(rows, shape.hidden_size), torch.randn(shape.draft_vocab_size, shape.hidden_size)
        logits, total = torch.randn(rows, len(weight)), torch.zeros_like(weight)
        self.flops = 2.0 * rows * weight.numel() * 3
        self.ways: list[list[Callable[[], Any]]] = [
            [lambda: product(hidden, weight), lambda: hidden @ weight.T],
            [lambda: product(logits, weight.T), lambda: logits @ weight],
            [lambda: product(logits.T, hidden.T), lambda: total.addmm_(logits.T, hidden)],
        ]

    def rate(self) -> float:
        """FLOP/s by the fastest way of each, the best of some calls."""
        return self.flops / sum(min(self._seconds(way) for way in ways for _ in range(5)) for ways in self.ways)

    @staticmethod
    def _seconds(call: Callable[[], Any]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started


def step_flops(shape: Shape) -> float:
    """Matrix products of a step of EAGLE-3 whose tokens are all supervised, forward and backward; attention's own are
    left out."""
    hidden, queries, keys = shape.hidden_size, shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM
    layer = 2 * hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * shape.intermediate_size
    rows = sum(shape.tokens - 2 - step for step in range(shape.steps))  # that are followed by a token to predict
    once = shape.tokens * hidden * (2 * shape.vocab_size + 4 * len(LAYERS) * hidden)  # the target's head, and ``fc``
    return once + 6.0 * rows * (hidden * shape.draft_vocab_size + layer)


def compare(shape: Shape, pythons: dict[str, str], rounds: int, threads: int) -> dict[str, Any]:
    """Measure all contenders on one shape."""
    workers = []
    for name, python in pythons.items():  # one after another: their first steps measure memory undisturbed
        workers.append(Worker(name, python, shape, threads))
    products = Products(shape)
    try:
        rates = alternate({worker.name: worker.step for worker in workers} | {"products": products.rate}, rounds)[
            "products"
        ]
    finally:
        for worker in workers:
            worker.close()
    ours = workers[0]
    contenders = {}
    for worker in workers:
        seconds = {kind: [step[f"{kind}_seconds"] for step in worker.steps] for kind in ("wall", "cpu")}
        mine = {kind: [step[f"{kind}_seconds"] for step in ours.steps] for kind in ("wall", "cpu")}
        losses = [worker.memory["loss"], *(step["loss"] for step in worker.steps)]
        contenders[worker.name] = {
            "tokens_per_second": shape.tokens / statistics.median(seconds["wall"]),
            "tokens_per_cpu_second": shape.tokens / statistics.median(seconds["cpu"]),
            "step_peak_mib": worker.memory["step_peak_mib"],
            "resident_mib": worker.memory["resident_mib"],
            "losses": losses,
            "loss_difference": abs(losses[0] - ours.memory["loss"]) / abs(ours.memory["loss"]),
            "product_flops_per_second": statistics.median(rates),
            "share_of_product_rate": None
            if shape.first_supervised or shape.family != "eagle3"
            else step_flops(shape) / median_product(seconds["wall"], rates),
            "ours_speed_ratio": median_ratio(seconds["wall"], mine["wall"]),
            "ours_cpu_speed_ratio": median_ratio(seconds["cpu"], mine["cpu"]),
            "ours_memory_ratio": ours.memory["step_peak_mib"] / worker.memory["step_peak_mib"],
            "seconds": seconds,
        }
    return contenders


def median_product(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of the product within a round."""
    return statistics.median(a * b for a, b in zip(ones, others, strict=True))


def show(title: str, contenders: dict[str, Any]) -> None:
    """One table."""
    print(f"\n{title}")
    header = [
        "",
        "tokens/s",
        "per CPU s",
        "step MiB",
        "loss",
        "of the products' rate",
        "ours: speed",
        "CPU speed",
        "memory",
    ]
    rows = [
        [
            name,
            f"{c['tokens_per_second']:.0f}",
            f"{c['tokens_per_cpu_second']:.0f}",
            f"{c['step_peak_mib']:.0f}",
            f"{c['losses'][0]:.6f}",
            "-" if c["share_of_product_rate"] is None else f"{c['share_of_product_rate']:.0%}",
            f"{c['ours_speed_ratio']:.2f}x",
            f"{c['ours_cpu_speed_ratio']:.2f}x",
            f"{c['ours_memory_ratio']:.2f}x",
        ]
        for name, c in contenders.items()
    ]
    print_table(header, rows)


def contenders_of(family: str, peer: str | None, reference: bool) -> dict[str, str]:
    """The interpreter of each contender, ours first. peer: one that has speculators."""
    names = ["ours", "ours-sampled"] if family == "eagle3" else ["ours"]
    if family == "eagle3" and reference:
        names.append("reference")
    found = dict.fromkeys(names, sys.executable)
    if peer:
        found["speculators"] = peer
        if family != "dflash":  # whose head both of them freeze
            found["speculators-frozen_head"] = peer
    return found


def comparable(name: str, family: str, first_supervised: int) -> bool:
    """Whether a contender's loss is ours by definition. A sample is other rows each time, and with a prompt speculators
    supervises other rows of EAGLE-3 than we do."""
    return name != "ours-sampled" and not (name.startswith("speculators") and family == "eagle3" and first_supervised)


def main() -> None:
    """Parse options, compare on each setting, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="eagle3")
    parser.add_argument("--speculators-python", help="interpreter of an environment with speculators 0.9.0")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each contender (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--draft-vocab-size", type=int, default=32_000)
    parser.add_argument("--vocab-size", type=int, help="of the target (default: as large as the draft vocabulary)")
    parser.add_argument("--num-layers", type=int, help="decoder layers (default 1, 4, 5)")
    parser.add_argument("--steps", type=int, help="steps of the training-time test, tokens of P-EAGLE (default 5, 8)")
    parser.add_argument("--anchors", type=int, default=512, help="blocks of DFlash in a step, on average (default 512)")
    parser.add_argument(
        "--no-reference", action="store_true", help="leave out EAGLE-3's plain reference, which needs 3 GiB"
    )
    arguments = parser.parse_args()

    pythons = contenders_of(arguments.family, arguments.speculators_python, not arguments.no_reference)
    chosen = {"num_layers": arguments.num_layers, "steps": arguments.steps}
    shape = {
        "family": arguments.family,
        "hidden_size": arguments.hidden_size,
        "intermediate_size": 3 * arguments.hidden_size,
        "num_heads": arguments.hidden_size // 64,
        "num_kv_heads": max(1, arguments.hidden_size // 256),
        "vocab_size": arguments.vocab_size or arguments.draft_vocab_size,
        "draft_vocab_size": arguments.draft_vocab_size,
        "tokens": arguments.tokens,
        "anchors": arguments.anchors,
        **DEFAULTS[arguments.family],
        **{name: value for name, value in chosen.items() if value is not None},
    }
    torch.set_num_threads(arguments.threads)
    settings = {"all_tokens_supervised": 0, "half_is_prompt": arguments.tokens // 2}
    result = {}
    disagreeing = []
    for title, first_supervised in settings.items():
        contenders = compare(
            Shape(**shape, first_supervised=first_supervised), pythons, arguments.rounds, arguments.threads
        )
        show(title.replace("_", " "), contenders)
        result[title] = contenders
        for name, contender in contenders.items():
            if comparable(name, arguments.family, first_supervised) and contender["loss_difference"] > LOSS_TOLERANCE:
                disagreeing.append(f"{name} ({title}): {contender['loss_difference']:.1e}")
    path = write_result(f"train_step_{arguments.family}", {**shape, "rounds": arguments.rounds}, {"contenders": result})
    print(f"\nwritten to {path}")
    if disagreeing:
        sys.exit(f"error: losses differ by more than {LOSS_TOLERANCE}: {', '.join(disagreeing)}")


if __name__ == "__main__":
    main()
