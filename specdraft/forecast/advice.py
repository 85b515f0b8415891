"""What the runs say, in sentences: how far to go on, which lever pays most, and which run would tell more."""

import math
from collections.abc import Iterator, Sequence

from specdraft.forecast.levers import DATA, HEAD, STEPS, Comparison, DataCurve
from specdraft.forecast.outlook import Interval, Outlook
from specdraft.forecast.runs import Run

_MUCH_READ = 4.0  # readings of the data, behind which it says little new


def advise(
    runs: Sequence[Run], outlooks: Sequence[Outlook], comparisons: Sequence[Comparison], curve: DataCurve | None
) -> list[str]:
    """Sentences about each run, then about the levers. The run with the highest acceptance is the one to go on with."""
    best = max(outlooks, key=lambda each: each.acceptance_length)
    levers = [(best.next_doubling, best.next_doubling_interval, f"twice the steps of {best.run}")]
    if curve is not None:
        levers.append((curve.doubling, curve.interval, f"twice the data ({2 * curve.sizes[-1]:g} conversations)"))
    levers += [(each.gain, each.interval, each.change) for each in comparisons if each.lever not in (STEPS, DATA)]
    run = next(each for each in runs if each.name == best.run)
    return [*(_stop(each) for each in outlooks), *_ranked(levers), *_missing(run, best, comparisons, curve)]


def _stop(outlook: Outlook) -> str:
    low, high = ("out of sight" if math.isinf(end) else _tokens(end) for end in outlook.stop_interval)
    least = f"less than {outlook.worth:.1%} of the acceptance length"
    if outlook.stop is None:
        return f"{outlook.run}: go on; no doubling that can be foreseen is expected to bring {least}"
    where = "here" if outlook.stop <= outlook.tokens else f"at about {_tokens(outlook.stop)} tokens"
    span = f"90 %: {low} to {high}"
    return f"{outlook.run}: stop {where} ({span}); behind that another doubling is expected to bring {least}"


def _ranked(levers: list[tuple[float, Interval, str]]) -> Iterator[str]:
    if len(levers) == 1:
        return
    (first, second, *_) = ordered = sorted(levers, reverse=True, key=lambda each: each[0])
    said = "; ".join(f"{name} {gain:+.2f} [{low:+.2f}, {high:+.2f}]" for gain, (low, high), name in ordered)
    apart = first[1][0] > second[0] and first[0] > second[1][1]
    yield f"what pays, in acceptance length: {said}"
    yield f"most pays {first[2]}" if apart else f"{first[2]} and {second[2]} cannot be told apart by these runs"


def _missing(run: Run, best: Outlook, comparisons: Sequence[Comparison], curve: DataCurve | None) -> Iterator[str]:
    like = f"no two runs tell: train one like {run.name} with"
    if curve is None:
        size = run.settings.get("data.limit", "null")
        half = "half of its conversations, by data.limit" if size == "null" else f"data.limit={int(size) // 2}"
        yield f"whether more data would pay {like} {half}"
    if best.readings is not None and best.readings > _MUCH_READ:
        yield f"{run.name} has read its data {best.readings:.1f} times: more steps without more data say little new"
    if not any(each.lever == HEAD for each in comparisons):
        yield f"whether another head would pay {like} one option of model.drafter changed"


def _tokens(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} k"
