"""The evaluation as plain text of 80 columns: it must survive a log file and a narrow terminal."""

from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.results import Estimate, Result

_NAME = 13
_POSITIONS = 8  # a line holds this many


def table(evaluation: Evaluation) -> str:
    """All results: a block per temperature, then the categories."""
    settings = evaluation.settings
    lines = [
        *([f"benchmark: {settings['benchmark']}"] if "benchmark" in settings else []),
        f"{settings['prompts']} prompts, up to {settings['max_new_tokens']} tokens each, drafts: "
        f"{settings['draft_tree']}, {settings['dtype']} on {settings['device']}",
        "intervals: 95 %, bootstrap-t over prompts",
    ]
    if settings["rule"].startswith("lossy"):
        lines.append(f"above temperature 0 the rule is {settings['rule']}")
    for temperature, share in evaluation.distinct_4gram.items():
        results = evaluation.at(temperature)
        alone = results[0].baseline_tokens_per_second
        lines += [
            "",
            f"Temperature {temperature:g}: without drafting {alone:.1f} tokens/s, distinct 4-grams {100 * share:.0f} %",
        ]
        for beside in (False, True):
            shown = [(result.drafter, result) for result in results if result.beside is beside]
            if shown:
                lines += _rows(shown, "drafter" if temperature == 0 else _drafting(shown[0][1], settings["engine"]))
        for result in results:
            lines += ["", *_details(result)]
        lines += [*_differences(results, settings["dtype"])]
        for result in results:
            own = [
                row for row in evaluation.categories if (row.drafter, row.temperature) == (result.drafter, temperature)
            ]
            if own:
                lines += ["", *_rows([(str(row.category), row) for row in own], f"by category: {result.drafter}")]
    return "\n".join(line.rstrip() for line in lines)


def _drafting(result: Result, engine: str | None) -> str:
    """What the results of a temperature above 0 are of. Drafters without parameters draft greedily in any case."""
    if result.beside:
        return f"for comparison, {result.drafting} drafts"
    return f"{result.drafting} drafts" + (f", as {engine} drafts" if engine else "")


def _rows(rows: list[tuple[str, Result]], title: str) -> list[str]:
    header = f"{'':{_NAME}}  {'acceptance length':17}  {'per request':17}  {'tokens/s':>8}  {'speedup':17}"
    lines = [title, header] if len(title) > _NAME else [f"{title:{_NAME}}{header[_NAME:]}"]
    for name, row in rows:
        short = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
        lines.append(
            f"{short:{_NAME}}  {_shown(row.acceptance_length):17}  {_shown(row.acceptance_length_per_request):17}  "
            f"{row.tokens_per_second:8.1f}  {_shown(row.speedup):17}"
        )
    return lines


def _details(result: Result) -> list[str]:
    counts = result.counts
    lines = [
        f"{result.label}: draft acceptance rate {counts.draft_acceptance_rate:.3f}, cost ratio c "
        f"{result.cost_ratio:.3f},",
        f"  modeled speedup {result.modeled_speedup:.2f}; verifying {result.nodes_per_round:.1f} nodes costs "
        f"{result.verification_cost_ratio:.2f} target steps",
    ]
    if result.divergence is not None:
        lines += [
            f"  LOSSY: the first token of a round is {result.divergence:.3f} (total variation, mean) away",
            "  from the target's distribution",
        ]
    for start in range(0, counts.num_draft_tokens, _POSITIONS):
        part = slice(start, min(start + _POSITIONS, counts.num_draft_tokens))
        lines += [
            f"  {'position':28}" + "".join(f"{i + 1:6d}" for i in range(part.start, part.stop)),
            f"  {'conditional acceptance rate':28}" + _rates(counts.conditional_acceptance_rate[part]),
            f"  {'survival':28}" + _rates(counts.survival[part]),
        ]
    return lines


def _differences(results: list[Result], dtype: str) -> list[str]:
    lines = []
    for result in results:
        if not result.differences:
            continue
        what = f"{len(result.differences)} of {result.requests} answers of {result.drafter} differ from the target's"
        gap = f"up to {max(each.ulps for each in result.differences):.1f} units in the last place of {dtype}"
        if result.lossless:
            lines += ["", f"{what} own:", f"  near-ties, logits {gap} apart"]
        else:
            lines += ["", f"!!! NOT LOSSLESS: {what} !!!", f"  own at temperature 0, logits {gap} apart"]
    return lines


def _shown(estimate: Estimate) -> str:
    if estimate.interval is None:
        return f"{estimate.value:.2f}"
    low, high = estimate.interval
    return f"{estimate.value:.2f} [{low:.2f}, {_four_characters(high)}]"


def _four_characters(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{min(value, 9999):.0f}"


def _rates(rates: list[float]) -> str:
    return "".join("     -" if rate != rate else f"{rate:6.3f}" for rate in rates)
