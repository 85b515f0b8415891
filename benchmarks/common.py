"""What the benchmarks share: runs in alternation, medians and ratios, and a dated JSON that says on what machine."""

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specdraft.evaluation.evaluation import machine, versions
from specdraft.files import atomic_file

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of the repository, which git ignores, for as long as a block lasts."""
    build = REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=build)


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each run once a round, A B C A B C: a neighbor that wakes up slows all of them, not one."""
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            measured[name].append(run())
    return measured


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def write_result(name: str, settings: dict[str, Any], result: dict[str, Any]) -> Path:
    """Write ``results/NAME-DATE-TIME.json`` and return its path."""
    now = datetime.now().astimezone()
    content = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        "machine": {**machine(), "load_average": [round(load, 2) for load in os.getloadavg()]},
        "versions": versions(),
        "settings": settings,
        **result,
    }
    path = RESULTS / f"{name}-{now:%Y-%m-%d-%H%M}.json"
    if path.exists():  # another run ended in the same minute
        path = RESULTS / f"{name}-{now:%Y-%m-%d-%H%M%S}.json"
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, numbers to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]))


def put_into_page(
    page: Path, mark: str, about: str, tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]
) -> None:
    """Replace what stands between ``<!-- MARK: begin -->`` and ``<!-- MARK: end -->`` by a sentence and tables."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    blocks = []
    for header, lines in tables:
        table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        blocks.append("\n".join([*table, *("| " + " | ".join(line) + " |" for line in lines)]))
    with atomic_file(page) as temporary:
        temporary.write_text(before + "\n\n".join([begin, about, *blocks, end]) + after, encoding="utf-8")
