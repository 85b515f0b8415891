"""The evaluation as one HTML page: no script, no network, no dependency; it follows the reader's light or dark mode."""

from html import escape
from pathlib import Path
from typing import Any

from specdraft.evaluation.evaluator import Evaluation
from specdraft.evaluation.results import Estimate, Result
from specdraft.files import atomic_file

_STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --soft: #5d6778; --page: #f6f7f9; --card: #fff; --line: #dfe3ea;
  --one: #2563eb; --two: #93b4f5; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #98a2b3; --page: #12151b; --card: #1a1f28;
  --line: #2d3543; --one: #6ea0ff; --two: #3a5794; --bad: #ff8a7a; } }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p { margin: .2rem 0 .8rem; color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
.figures { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
.figures .card { flex: 1 1 9rem; } .figures b { display: block; font-size: 1.7rem; line-height: 1.25; }
.figures span { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; margin-bottom: .8rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child { text-align: left; } td small { color: var(--soft); }
.charts { display: flex; flex-wrap: wrap; gap: .8rem; } .charts .card { flex: 1 1 20rem; }
svg { width: 100%; max-width: 30rem; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.one { fill: var(--one); } .two { fill: var(--two); } .axis { stroke: var(--line); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .4rem 0;
  overflow-wrap: anywhere; }
dt { color: var(--soft); } dd { margin: 0; } summary { cursor: pointer; }
"""


def write_report(evaluation: Evaluation, path: Path) -> Path:
    """Write the page to ``path``; the file is whole or absent."""
    with atomic_file(path) as temporary:
        temporary.write_text(html(evaluation), encoding="utf-8")
    return path


def html(evaluation: Evaluation) -> str:
    """The page: headline figures, a section per temperature, settings and machine."""
    settings, main = evaluation.settings, evaluation.results[0]
    title = f"{main.drafter} for {settings['target']['name']}"
    figures = [
        (f"{main.acceptance_length.value:.2f}", f"acceptance length at temperature {main.temperature:g}"),
        (f"{main.speedup.value:.2f}×", "measured speedup over the same loop without drafting"),
        (f"{main.counts.draft_acceptance_rate:.0%}", f"draft acceptance rate, K = {settings['num_draft_tokens']}"),
        (f"{evaluation.distinct_4gram[main.temperature]:.0%}", "distinct 4-grams in the target's own answers"),
    ]
    cards = "".join(f'<div class="card"><b>{value}</b><span>{escape(label)}</span></div>' for value, label in figures)
    sections = "".join(_section(evaluation, temperature) for temperature in evaluation.distinct_4gram)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>
<h1>{escape(title)}</h1>
<p>{settings["prompts"]} prompts, up to {settings["max_new_tokens"]} tokens each, drafts: {settings["draft_tree"]},
{escape(settings["rule"])},
{escape(settings["dtype"])} on {escape(settings["device"])}; {escape(evaluation.created)}.
Brackets hold 95 % bootstrap intervals over prompts.</p>
<div class="figures">{cards}</div>
{sections}
<h2>Settings</h2><div class="card">{_definitions(settings)}</div>
<h2>Machine and versions</h2><div class="card">{_definitions({**evaluation.machine, **evaluation.versions})}</div>
</main></body></html>
"""


def _section(evaluation: Evaluation, temperature: float) -> str:
    results = evaluation.at(temperature)
    share = evaluation.distinct_4gram[temperature]
    charts = "".join(f'<div class="card">{_chart(result)}</div>' for result in results)
    warnings = "".join(
        f'<p class="bad">{result.differing_requests} of {result.requests} answers of {escape(result.drafter)} differ '
        f"from the target's own at temperature 0 in {escape(evaluation.settings['dtype'])}.</p>"
        for result in results
        if result.differing_requests
    )
    warnings += "".join(
        f'<p class="bad">{escape(evaluation.settings["rule"])}: the first token of a round of '
        f"{escape(result.drafter)} is {result.divergence:.3f} (total variation, mean over rounds) away from the "
        "target's distribution.</p>"
        for result in results
        if result.divergence is not None
    )
    categories = [row for row in evaluation.categories if row.temperature == temperature]
    by_category = (
        "<details><summary>By category</summary>"
        + _table([(f"{row.category} · {row.drafter}", row) for row in categories], "category")
        + "</details>"
        if categories
        else ""
    )
    return (
        f"<h2>Temperature {temperature:g}</h2>"
        f"<p>Without drafting {results[0].baseline_tokens_per_second:.1f} tokens/s; {share:.0%} of the 4-grams in the "
        f"target's own answers are distinct.</p>{warnings}"
        + _table([(result.drafter, result) for result in results], "drafter")
        + by_category
        + f'<div class="charts">{charts}</div>'
    )


def _table(rows: list[tuple[str, Result]], first: str) -> str:
    heads = (
        first,
        "acceptance length",
        "per request",
        "draft acceptance rate",
        "tokens/s",
        "speedup",
        "cost ratio c",
        "modelled speedup",
    )
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{_shown(row.acceptance_length)}</td>"
        f"<td>{_shown(row.acceptance_length_per_request)}</td><td>{_number(row.counts.draft_acceptance_rate, 3)}</td>"
        f"<td>{_number(row.tokens_per_second, 1)}</td><td>{_shown(row.speedup)}</td>"
        f"<td>{_number(row.cost_ratio, 3)}</td><td>{_number(row.modelled_speedup, 2)}</td></tr>"
        for name, row in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f'<div class="card scroll"><table><tr>{head}</tr>{body}</table></div>'


def _chart(result: Result) -> str:
    """Bars of conditional acceptance rate and survival by position."""
    positions, height, left, top = result.counts.num_draft_tokens, 150, 30, 34
    step = max(26.0, 330 / positions)
    bar = 0.36 * step
    width = left + step * positions + 4
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {top + height + 20}" role="img" '
        f'aria-label="Acceptance of {escape(result.drafter)} by position">',
        f'<text x="0" y="12">{escape(result.drafter)}: acceptance by position</text>',
        '<rect class="one" x="0" y="19" width="9" height="9"/><text x="13" y="27">conditional</text>',
        '<rect class="two" x="80" y="19" width="9" height="9"/><text x="93" y="27">survival</text>',
    ]
    for tick in (0.0, 0.5, 1.0):
        y = top + height * (1 - tick)
        parts.append(f'<line class="axis" x1="{left}" x2="{width:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    rates = zip(result.counts.conditional_acceptance_rate, result.counts.survival, strict=True)
    for position, pair in enumerate(rates):
        x = left + step * position + 0.12 * step
        for offset, (name, label, rate) in enumerate(
            (("one", "conditional acceptance rate", pair[0]), ("two", "survival", pair[1]))
        ):
            if rate != rate:  # no round reached this position
                continue
            y = top + height * (1 - rate)
            parts.append(
                f'<rect class="{name}" x="{x + offset * (bar + 1):.1f}" y="{y:.1f}" width="{bar:.1f}" '
                f'height="{height * rate:.1f}" rx="1.5"><title>position {position + 1}: {label} {rate:.3f}</title>'
                "</rect>"
            )
        middle = left + step * (position + 0.5)
        parts.append(f'<text x="{middle:.1f}" y="{top + height + 15}" text-anchor="middle">{position + 1}</text>')
    return "".join(parts) + "</svg>"


def _definitions(values: dict[str, Any]) -> str:
    rows = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(_plain(value))}</dd>" for key, value in values.items())
    return f"<dl>{rows}</dl>"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return "none" if value is None else str(value)


def _shown(estimate: Estimate) -> str:
    if estimate.interval is None:
        return _number(estimate.value, 2)
    low, high = estimate.interval
    return f"{estimate.value:.2f} <small>[{low:.2f}, {high:.2f}]</small>"


def _number(value: float, digits: int) -> str:
    return "–" if value != value else f"{value:.{digits}f}"
