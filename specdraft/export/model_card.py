"""The README.md beside exported weights: whose head it is, how it is served, and what was measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdraft.errors import UserError
from specdraft.export.engine import Engine
from specdraft.export.layout import Layout
from specdraft.targets.loading import location

_CONDITIONS = (
    "\nThat is what a cost model predicts for specdraft's own decoding loop on the machine and prompts below, from "
    "measured acceptance and step times; an engine's own times differ, so measure there, too.\n\n"
)


def model_card(
    checkpoint: Mapping[str, Any], layout: Layout, engine: Engine, directory: Path, evaluation: Path | None
) -> str:
    """Markdown. ``checkpoint`` is the config.json of the checkpoint."""
    target = checkpoint["target"]
    try:
        measured = None if evaluation is None else json.loads(evaluation.read_text(encoding="utf-8"))
        advised, acceptance = _advised(measured), _acceptance(measured, engine)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{evaluation} is not an evaluation that specdraft wrote ({type(error).__name__}: {error}): "
            "remove it or run evaluate.py again"
        ) from error
    k = _num_draft_tokens(checkpoint, layout, advised)
    facts = {
        "target": f"`{target['name']}`",
        "target revision": target.get("revision") or "not pinned",
        "target config hash": f"`{target['config_hash']}`",
        **layout.facts,
        "draft tokens per round (K)": str(k),
        "training data": _data(checkpoint.get("extra", {}).get("data", {})),
        "weights": layout.dtype,
        "specdraft": checkpoint.get("specdraft_version", "unknown"),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    # An engine knows no embedded:// names, it wants the folder.
    usage = engine.usage(layout, location(target["name"]), str(directory), k)
    return (
        f"# {layout.title[0].upper()}{layout.title[1:]} for {target['name']}\n\n"
        "A drafter for speculative decoding. It works with this target only; the output is the target's own.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n## Serving with {engine.name}\n\n{usage}\n## Acceptance\n\n{acceptance}"
    )


def _advised(measured: Mapping[str, Any] | None) -> int | None:
    """K as the evaluation advises; None if it advises nothing, or not to draft."""
    advice = (measured or {}).get("advice") or [{}]
    k = advice[0].get("num_speculative_tokens")
    return None if k is None else int(k)


def _num_draft_tokens(checkpoint: Mapping[str, Any], layout: Layout, advised: int | None) -> int:
    """K: what was advised, else as the checkpoint was trained; Medusa has no more than its heads."""
    k = advised or int(checkpoint.get("extra", {}).get("decoding", {}).get("num_draft_tokens", 5))
    return min(k, layout.config.get("medusa_num_heads", k))


def _data(about: Mapping[str, Any]) -> str:
    if "source" not in about:
        return "not recorded"
    given = about.get("temperatures")
    known = [t for t in given if isinstance(t, int | float)] if isinstance(given, list) else []
    temperatures = ", ".join(f"{temperature:g}" for temperature in known)
    answers = f"answered by the target at temperature {temperatures}" if about.get("regenerated") else "as it was"
    return f"{about['source']}, {answers}"


def _acceptance(measured: Mapping[str, Any] | None, engine: Engine) -> str:
    if measured is None:
        return "Not measured: no evaluation.json lay beside the checkpoint.\n"
    settings = measured["settings"]
    lines = [
        f"| {row['drafter']} | {row['temperature']:g} | {row.get('drafting', 'sampled')} | "
        f"{_number(row['acceptance_length'], 2)} | {_number(row['draft_acceptance_rate'], 3)} | "
        f"{_number(row['speedup'], 2)} | {', '.join(_number(rate, 2) for rate in row['conditional_acceptance_rate'])} |"
        for row in measured["results"]
    ]
    advice = "".join(f"{each['sentence']}\n{_CONDITIONS}" for each in (measured.get("advice") or [])[:1])
    title = (
        f"{settings['prompts']} prompts of {settings.get('benchmark', 'an unnamed benchmark')}, up to "
        f"{settings['max_new_tokens']} tokens each, {settings['draft_tree']}, "
        f"{settings.get('rule', 'rejection sampling')}, measured by specdraft's own decoding loop "
        f"({settings['dtype']} on {settings['device']}), {measured['created']}.\n\n"
    )
    head = (
        "| drafter | temperature | drafts | acceptance length | draft acceptance rate | speedup | "
        "conditional acceptance rate by position |\n|---|---|---|---|---|---|---|\n"
    )
    return advice + title + head + "\n".join(lines) + "\n" + _drafting(measured["results"], engine)


def _drafting(results: Sequence[Mapping[str, Any]], engine: Engine) -> str:
    """Which rows describe what the engine does above temperature 0."""
    warm = [row for row in results if row["temperature"] > 0 and row["drafter"] == results[0]["drafter"]]
    if not warm:
        return ""
    served = f"\nAbove temperature 0 {engine.name} makes {engine.drafting} drafts unless it is told otherwise: "
    if any(row.get("drafting", "sampled") == engine.drafting for row in warm):
        return f"{served}that is what the rows with {engine.drafting} drafts describe.\n"
    return f"{served}none was measured, and its acceptance differs from that of the rows above.\n"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
