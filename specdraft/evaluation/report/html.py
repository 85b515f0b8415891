"""The evaluation as one HTML page: no script, no network; it follows the reader's light or dark mode."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specdraft.decoding.trace import ACCEPTED, REJECTED, Segment
from specdraft.evaluation.evaluator import Evaluation
from specdraft.evaluation.report import svg as charts
from specdraft.evaluation.report import token_view
from specdraft.evaluation.report.charts import cost_charts, overview_charts, temperature_charts
from specdraft.files import atomic_file

_FOLDER = Path(__file__).parent
_STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --soft: #4f5969; --page: #f6f7f9; --card: #fff; --line: #dfe3ea;
  --one: #0072b2; --bad: #a3310c; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #a9b3c2; --page: #12151b; --card: #1a1f28;
  --line: #2d3543; --one: #56b4e9; --bad: #ff9d7a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.6rem 1rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p { margin: .2rem 0 .8rem; max-width: 52rem; color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; margin: 0; }
.advice { border-left: 4px solid var(--one); margin: .8rem 0; } .advice p { color: var(--text); font-size: 1.05rem;
  margin: 0; max-width: none; } .date { white-space: nowrap; }
.flags { margin: .5rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.figures b { display: block; font-size: 1.7rem; line-height: 1.25; }
.figures span { display: block; color: var(--soft); font-size: .85rem; text-wrap: balance; }
.scroll { overflow-x: auto; margin-bottom: .8rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; vertical-align: bottom; white-space: normal;
  overflow-wrap: normal; }
tr:last-child td { border-bottom: 0; } th:first-child, td:first-child { text-align: left; }
td small { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); gap: .8rem;
  margin: .8rem 0; } figcaption { font-weight: 600; margin-bottom: .5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; } summary { cursor: pointer; }
.answer { margin: .8rem 0; } .question { white-space: pre-wrap; color: var(--soft);
  font: 12px/1.5 ui-monospace, monospace; border-bottom: 1px solid var(--line); padding-bottom: .6rem; }
p.sample { max-width: none; } #rejected:not(:checked) ~ .answer s { display: none; }
"""


def write_report(evaluation: Evaluation, path: Path) -> Path:
    """Write the page to ``path``; the file is whole or absent."""
    with atomic_file(path) as temporary:
        temporary.write_text(html(evaluation.to_dict()), encoding="utf-8")
    return path


def html(evaluation: Mapping[str, Any]) -> str:
    """The page of an evaluation as ``Evaluation.to_dict`` gives it and ``evaluation.json`` holds it."""
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    settings, first = evaluation["settings"], evaluation["results"][0]
    baseline = {each["temperature"]: each for each in evaluation["baseline"]}
    drafters = list(dict.fromkeys(row["label"] for row in evaluation["results"]))
    compared = drafters[: 1 + len(settings.get("compared", []))]
    whose = f"{first['drafter']}: " if len(compared) > 1 else ""
    figures = [
        (_number(first["acceptance_length"], 2), f"{whose}acceptance length at temperature {first['temperature']:g}"),
        (f"{_number(first['speedup'], 2)}×", f"{whose}measured speedup over the same loop without drafting"),
        (
            _share(first["draft_acceptance_rate"]),
            f"{whose}of the drafted tokens accepted, K = {first['num_draft_tokens']}",
        ),
        (_share(baseline[first["temperature"]]["distinct_4gram"]), "distinct 4-grams in the target's own answers"),
    ]
    sections = []
    for temperature, alone in baseline.items():
        results = [row for row in evaluation["results"] if row["temperature"] == temperature]
        categories = [row for row in evaluation["categories"] if row["temperature"] == temperature]
        sections.append(
            {
                "temperature": f"{temperature:g}",
                "about": f"Without drafting {_number(alone['tokens_per_second'], 1)} tokens/s; "
                f"{_share(alone['distinct_4gram'])} of the 4-grams in the target's own answers are distinct.",
                "table": _table([(row["label"] + _drafting(row), row) for row in results], "drafter"),
                "charts": _markup(temperature_charts(results, categories)),
                "categories": _table([(f"{row['category']} · {row['drafter']}", row) for row in categories], "category")
                if categories
                else "",
            }
        )
    return environment.get_template("report.html.jinja").render(
        title=f"{', '.join(compared)} for {settings['target']['name']}",
        style=Markup(_STYLE + charts.STYLE + token_view.STYLE),
        created=_when(evaluation["created"]),
        settings=settings,
        machine={**evaluation["machine"], **evaluation["versions"]},
        warnings=list(_warnings(evaluation)),
        advice=evaluation["advice"],
        figures=figures,
        costs=_markup(cost_charts(evaluation)),
        overview=_markup(overview_charts(evaluation["results"], drafters)),
        sections=sections,
        key=Markup(token_view.KEY),
        samples=[_sample(each) for each in evaluation["samples"]],
        about=_about,
    )


def _warnings(evaluation: Mapping[str, Any]) -> Iterable[str]:
    settings = evaluation["settings"]
    for row in evaluation["results"]:
        if row["differences"]:
            gaps = [each["ulps"] for each in row["differences"]]
            apart = "" if None in gaps else f" up to {max(gaps):.1f}"
            verdict = "These are near-ties" if row["lossless"] else "NOT LOSSLESS"
            yield (
                f"{len(gaps)} of {row['requests']} answers of {row['drafter']} differ from the target's own at "
                f"temperature {row['temperature']:g}. {verdict}: the logits of the first tokens that differ are"
                f"{apart} units in the last place of {settings['dtype']} apart."
            )
        if row["divergence"] is not None:
            yield (
                f"{settings['rule']}: the first token of a round of {row['drafter']} is {row['divergence']:.3f} (total "
                "variation, mean over rounds) away from the target's distribution."
            )


def _drafting(row: Mapping[str, Any]) -> str:
    return f" · {row['drafting']} drafts" if row["temperature"] and not row["beside"] else ""


def _when(created: str) -> str:
    return datetime.fromisoformat(created).strftime("%Y-%m-%d %H:%M %Z")


def _sample(recorded: Mapping[str, Any]) -> dict[str, Any]:
    found = [Segment(**segment) for segment in recorded["segments"]]
    shown = sum(len(segment.text) for segment in found if segment.status != REJECTED)
    drafted = sum(len(segment.text) for segment in found if segment.status == ACCEPTED)
    return {
        **recorded,
        "temperature": f"{recorded['temperature']:g}",
        "share": _share(drafted / max(shown, 1)),
        "text": Markup(token_view.colored(found)),
    }


def _markup(named: Iterable[tuple[str, str]]) -> list[tuple[str, Markup]]:
    return [(caption, Markup(svg)) for caption, svg in named]


def _table(rows: list[tuple[str, Mapping[str, Any]]], first: str) -> Markup:
    heads = (
        first,
        "acceptance length",
        "per request",
        "draft acceptance rate",
        "tokens/s",
        "speedup",
        "cost ratio c",
        "verification",
        "nodes",
    )
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{_shown(row, 'acceptance_length')}</td>"
        f"<td>{_shown(row, 'acceptance_length_per_request')}</td><td>{_number(row['draft_acceptance_rate'], 3)}</td>"
        f"<td>{_number(row['tokens_per_second'], 1)}</td><td>{_shown(row, 'speedup')}</td>"
        f"<td>{_number(row['cost_ratio'], 3)}</td><td>{_number(row['verification_cost_ratio'], 2)}</td>"
        f"<td>{_number(row['nodes_per_round'], 1)}</td></tr>"
        for name, row in rows
    )
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return Markup(f'<div class="card scroll"><table><tr>{head}</tr>{body}</table></div>')


def _about(values: Mapping[str, Any]) -> Markup:
    rows = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(_plain(value))}</dd>" for key, value in values.items())
    return Markup(f"<dl>{rows}</dl>")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return "none" if value is None else str(value)


def _shown(row: Mapping[str, Any], name: str) -> str:
    interval = row[f"{name}_interval"]
    value = _number(row[name], 2)
    return value if interval is None else f"{value} <small>[{interval[0]:.2f}, {interval[1]:.2f}]</small>"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
