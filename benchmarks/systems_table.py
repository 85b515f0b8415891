"""Systems of one or several runs of ``systems.py`` as one table in docs/which-drafter.md.

``python benchmarks/systems_table.py MARK RESULT.json ...``: what stands at the mark is replaced. Runs must be of the
same prompts, tokens and target. Where two hold the same system, the later one counts. With ``--kinds`` the tables have
a column for each category of prompts instead of speeds, the best of every column in bold.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from common import REPOSITORY, put_into_page
from specdraft.errors import UserError, exit_on_user_error

PAGE = REPOSITORY / "docs" / "which-drafter.md"
Table = tuple[list[str], list[list[str]]]
_NOTHING = "–"
_ALIKE = ("target", "dtype", "tuned", "prompts", "per_category", "limit", "turns", "max_new_tokens", "num_draft_tokens")


def merged(results: list[dict[str, Any]], without: list[str]) -> list[dict[str, Any]]:
    """What all runs found, each system and temperature once. Raises UserError for runs that measured something else."""
    first = results[0]["settings"]
    for other in results[1:]:
        for key in _ALIKE:
            if other["settings"].get(key) != first.get(key):
                wrong = f"one run has {key}={first.get(key)!r}, another {other['settings'].get(key)!r}"
                raise UserError(f"{wrong}: expected runs of the same prompts, tokens and target; give those alone")
    found = {(each["system"], each["temperature"]): each for result in results for each in result["found"]}
    return [each for each in found.values() if each["system"] not in without]


def rows_of(found: list[dict[str, Any]]) -> Table:
    """A line per system: lengths and speeds at every temperature, memory."""
    temperatures = sorted({each["temperature"] for each in found})
    by_place = {(each["system"], each["temperature"]): each for each in found}
    rows = []
    for name in dict.fromkeys(each["system"] for each in found):
        row, held = [name], 0.0
        for temperature in temperatures:
            each = by_place.get((name, temperature))
            if each is None:
                row += [_NOTHING, _NOTHING]
                continue
            low, high = each["speedup_interval"] or (float("nan"),) * 2
            row += [_length(each, "all"), f"{each['speedup']:.2f} [{low:.2f}, {high:.2f}]"]
            held = max(held, each["extra_bytes"])
        rows.append([*row, f"{held / 1e6:.1f}"])
    columns = [column for t in temperatures for column in (f"accepted, T = {t:g}", "speed")]
    return ["", *columns, "extra MB"], rows


def by_kind(found: list[dict[str, Any]], categories: list[str]) -> Table:
    """A line per system, those that are accepted most first, a column per category, of one temperature."""
    ranked = sorted(found, key=lambda each: -each["acceptance_length"].get("all", 1.0))
    best = {name: max(_length(each, name) for each in ranked) for name in categories}
    rows = []
    for each in ranked:
        lengths = [_length(each, name) for name in categories]
        marked = [f"**{one}**" if one == best[name] else one for one, name in zip(lengths, categories, strict=True)]
        rows.append([each["system"], *marked, f"{max(each['extra_bytes'], 0) / 1e6:.1f}"])
    return [f"T = {found[0]['temperature']:g}", *(name.replace("_", " ") for name in categories), "extra MB"], rows


def _length(each: dict[str, Any], category: str) -> str:
    return f"{each['acceptance_length'].get(category, 1.0):.2f}"


def about(result: dict[str, Any], files: list[str], kinds: bool) -> str:
    """What the tables show, in a sentence."""
    settings = result["settings"]
    batch = settings.get("side_by_side", 1)
    together = f"{batch} requests side by side" if batch > 1 else "one request at a time"
    turns = "all turns" if settings["turns"] is None else f"{settings['turns']} turn(s)"
    speeds = ("tokens a round", "speed beside plain decoding with 95 % intervals", "what is held beyond it")
    shown = "tokens a round" if kinds else ", ".join(speeds)
    changed = f"**the target was changed** ({settings['tuned']}); " if settings.get("tuned") else ""
    return (
        f"Chains of {settings['num_draft_tokens']} unless it says otherwise, {result['prompts']} prompts of "
        f"`{settings['prompts']}`, {turns}, answers of up to {settings['max_new_tokens']} tokens"
        f"{'' if kinds else f', {together}'}: {shown}; {changed}all figures in "
        f"{', '.join(f'`{name}`' for name in files)} of `benchmarks/results/`."
    )


@exit_on_user_error
def main() -> None:
    """Parse options, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mark", help="of the page, as in <!-- MARK: begin -->")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--kinds", action="store_true", help="acceptance by category instead of speeds")
    parser.add_argument("--without", nargs="+", default=[], metavar="SYSTEM", help="systems to leave out")
    options = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    found = merged(results, options.without)
    tables = [rows_of(found)]
    if options.kinds:
        temperatures = sorted({each["temperature"] for each in found})
        by_temperature = [[each for each in found if each["temperature"] == t] for t in temperatures]
        tables = [by_kind(each, results[0]["categories"]) for each in by_temperature]
    files = [path.name for path in options.results]
    put_into_page(PAGE, options.mark, about(results[0], files, options.kinds), tables)


if __name__ == "__main__":
    main()
