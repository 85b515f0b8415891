"""Which of more steps, more data or another head pays most: what runs tell that differ in one of them alone.

Runs that differ only in the seed say how far two trainings of the same settings end apart, which widens every
comparison."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from specdraft.forecast.curves import DRAWS, Array, fit_curves
from specdraft.forecast.outlook import Interval, fit_run, interval_of
from specdraft.forecast.runs import Run

STEPS, DATA, HEAD, MEASURED = "steps", "data", "head", "how acceptance is measured"
# The longest prefix of a setting's name decides; None: what does not change how well a head is trained.
_LEVERS = {
    "trainer.max_steps": STEPS,
    "trainer.accumulate_grad_batches": STEPS,
    "trainer.devices": STEPS,
    "data.batch_size": STEPS,
    "data": DATA,
    "data.source": MEASURED,
    "model": HEAD,
    "model.optimizer": "optimizer",
    "init": "init",
    "quantize": "quantize",
    "target.name": "target",
    "decoding": MEASURED,
    "live.prompts": MEASURED,
    "live.max_new_tokens": MEASURED,
    "data.validation_limit": MEASURED,
    "data.num_proc": None,
    "data.num_workers": None,
    "data.cache_dir": None,
    "data.share": None,
    "data.read_ahead": None,
    "data.seed": None,
    "data.benchmark": None,
}
_SIZE = "data.limit"


@dataclass(frozen=True)
class Comparison:
    """Two runs that differ in one lever, the first with less of it where that can be said. ``gain``: what the second
    has more, of the acceptance length at its end, and ``speedup_gain`` of the speedup at its own cost of a round."""

    lever: str
    change: str
    less: str
    more: str
    gain: float
    interval: Interval
    speedup_gain: float | None


@dataclass(frozen=True)
class DataCurve:
    """Runs that differ in ``data.limit`` alone: what twice the largest amount would bring."""

    runs: list[str]
    sizes: list[float]
    doubling: float
    interval: Interval


def lever(name: str) -> str | None:
    """Which lever a setting belongs to, by its dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in _LEVERS:
            return _LEVERS[prefix]
    return None


def differences(first: Run, second: Run) -> dict[str, list[str]]:
    """The settings in which two runs differ, by their levers."""
    found: dict[str, list[str]] = {}
    for name in sorted(first.settings.keys() | second.settings.keys()):
        of = lever(name)
        if of is not None and first.settings.get(name) != second.settings.get(name):
            found.setdefault(of, []).append(name)
    return found


def seed_spread(runs: Sequence[Run]) -> float | None:
    """Standard deviation of the length at the end between runs of the same settings; None without any."""
    squares = [
        float(_end(a).mean() - _end(b).mean()) ** 2 / 2 for a, b in combinations(runs, 2) if not differences(a, b)
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def compare(runs: Sequence[Run]) -> Iterator[Comparison]:
    """Every pair of runs that differs in one lever."""
    between = seed_spread(runs) or 0.0
    for a, b in combinations(runs, 2):
        found = differences(a, b)
        if len(found) != 1 or MEASURED in found:
            continue
        ((of, names),) = found.items()
        less, more = (b, a) if _amount(a, of, names) > _amount(b, of, names) else (a, b)
        gained = _end(more) - _end(less) + _chance(between)
        timed = not math.isnan(less.round_cost) and not math.isnan(more.round_cost)
        faster = float(_end(more).mean() / more.round_cost - _end(less).mean() / less.round_cost) if timed else None
        change = ", ".join(f"{name} from {_said(less, name)} to {_said(more, name)}" for name in names)
        yield Comparison(of, change, less.name, more.name, float(gained.mean()), interval_of(gained), faster)


def data_curve(runs: Sequence[Run]) -> DataCurve | None:
    """A curve over ``data.limit`` of the largest group of runs that differ in nothing else."""
    groups = [[b for b in runs if a is b or differences(a, b) in ({DATA: [_SIZE]}, {})] for a in runs]
    sized = [{size: run for run in group if (size := _number(run, _SIZE)) is not None} for group in groups]
    by_size = max(sized, key=len, default={})
    if len(by_size) < 2:
        return None
    sizes = sorted(by_size)
    ends = [_end(by_size[size]) for size in sizes]
    noise = math.hypot(float(np.mean([each.std() for each in ends])), seed_spread(runs) or 0.0)
    lengths = np.array([each.mean() for each in ends])
    ceiling = by_size[sizes[0]].num_draft_tokens + 1.0
    curves = fit_curves(np.array(sizes), lengths, np.zeros(len(sizes)), ceiling, noise=noise, known=True)
    gained = curves.at(2 * sizes[-1]) - curves.at(sizes[-1])
    return DataCurve([by_size[size].name for size in sizes], sizes, float(gained.mean()), interval_of(gained))


def _end(run: Run) -> Array:
    """Draws of the acceptance length at the end of a run, on its own prompts: smoother than its last measurement."""
    return fit_run(run).at(float(run.tokens[-1]), float(run.decay[-1]))


def _chance(between: float) -> Array:
    """Draws of the difference that two seeds make."""
    return math.sqrt(2) * between * np.random.default_rng(0).standard_normal(DRAWS)


def _number(run: Run, name: str) -> float | None:
    said = run.settings.get(name, "null")
    try:
        return float(said)
    except ValueError:
        return None


def _amount(run: Run, of: str, names: Sequence[str]) -> float:
    if of == STEPS:
        return float(run.tokens[-1])
    return _number(run, names[0]) or 0.0


def _said(run: Run, name: str) -> str:
    return str(run.settings.get(name, "nothing")).strip('"')
