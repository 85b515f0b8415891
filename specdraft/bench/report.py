"""What people read of a measurement: the table, and a page of curves over the load."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from specdraft.bench.load import Load
from specdraft.evaluation.report.svg import Chart, Point, Series
from specdraft.rendering import render

_TOGETHER = 4  # series of a chart that can be told apart
Record = Mapping[str, Any]


def table(bench: Record) -> str:
    """All results as plain text, a block for each load."""
    return render("bench/templates/table.txt.jinja", bench=bench, loads=by_load(bench)).strip()


def html(bench: Record) -> str:
    """One page without script or network, of a measurement as ``bench.json`` holds it; light or dark."""
    created = datetime.fromisoformat(bench["created"])
    values = {"bench": bench, "created": created, "loads": by_load(bench), "groups": groups(bench)}
    return render("bench/templates/page.html.jinja", **values)


def by_load(bench: Record) -> list[tuple[str, list[Record]]]:
    """Each load in words, and the results at it."""
    found: dict[str, list[Record]] = {}
    for each in bench["results"]:
        found.setdefault(str(Load(each["load"]["kind"], each["load"]["value"])), []).append(each)
    return list(found.items())


def groups(bench: Record) -> list[tuple[str, list[Chart]]]:
    """Title and curves of every kind of load and of every method beside plain, as many contenders as can be told
    apart in one chart."""
    found = []
    results = bench["results"]
    reference = bench["contenders"][0]["name"]
    for kind in dict.fromkeys(each["load"]["kind"] for each in results):
        for method in dict.fromkeys(each["method"] for each in bench["contenders"][1:]) or [reference]:
            names = [each["name"] for each in bench["contenders"][1:] if each["method"] == method]
            parts = [names[start : start + _TOGETHER - 1] for start in range(0, len(names), _TOGETHER - 1)] or [[]]
            for part in parts:
                own = [each for each in results if each["load"]["kind"] == kind]
                charts = [chart for chart in _charts(own, [reference, *part], kind) if chart.drawn]
                found.append((f"{method}, by {kind}", charts))
    return found


def _charts(results: Sequence[Record], names: Sequence[str], kind: str) -> Iterator[Chart]:
    label = "requests at a time" if kind == "concurrency" else "requests a second"
    drafting = names[1:] or names

    def over(of: Sequence[str], value: Any, interval: str = "") -> list[Series]:
        numbered = [(names.index(name), name) for name in of]
        return [
            Series(
                name,
                [
                    Point(each["load"]["value"], value(each), each.get(interval))
                    for each in results
                    if each["contender"] == name
                ],
                number=number,
            )
            for number, name in numbered
        ]

    yield Chart("Tokens a second", "lines", over(names, lambda each: each["tokens_per_second"]), label)
    speeds = over(drafting, lambda each: each["speedup"], "speedup_interval")
    yield Chart("Speedup over plain", "lines", speeds, label, one=True)
    for key, title in (("ttft_ms", "Time to first token"), ("tpot_ms", "Time per output token")):
        for share in ("p50", "p99"):
            series = over(names, lambda each, key=key, share=share: each[key][share] if each[key] else None)
            yield Chart(f"{title}, {share}, ms", "lines", series, label)
    yield Chart("Requests in time, a second", "lines", over(names, lambda each: each["goodput"]), label)
    first = min((each["load"]["value"] for each in results), default=0)
    series = [
        Series(
            each["contender"],
            [Point(i, n / each["rounds"]) for i, n in enumerate(each["accepted_per_position"], start=1)],
            number=names.index(each["contender"]),
        )
        for each in results
        if each["contender"] in names and each["load"]["value"] == first
    ]
    yield Chart(f"Rounds that accept a position, {first:g} {label}", "lines", series, "position in the draft")
