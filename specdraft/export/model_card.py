"""The README.md beside exported weights: whose head it is, how it is served, and what was measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from specdraft.drafters.checkpoint import recorded_options
from specdraft.errors import UserError
from specdraft.export.engine import Engine
from specdraft.export.layout import Layout
from specdraft.rendering import render
from specdraft.targets.loading import location

EVALUATION = "evaluation.json"


def evaluation_of(source: Path) -> Path | None:
    """Where the evaluation of the drafter in the directory ``source`` lies: in it, or beside it as in a run."""
    return next(filter(Path.is_file, (folder / EVALUATION for folder in (source, source.parent))), None)


def about_these_weights(evaluation: Path | None, quantization: str | None) -> dict[str, Any] | None:
    """What was measured, None if that was of weights quantized otherwise. Raises OSError, ValueError or KeyError for a
    file that holds something else."""
    measured = None if evaluation is None else json.loads(evaluation.read_text(encoding="utf-8"))
    return None if measured is None or measured["settings"].get("quantization") != quantization else measured


def model_card(
    checkpoint: Mapping[str, Any], layout: Layout, engine: Engine, directory: str | Path, evaluation: Path | None
) -> str:
    """Markdown. ``checkpoint`` is the config.json of the checkpoint; ``directory`` is what the engine is told to load.
    Raises UserError for a damaged ``evaluation``."""
    target, extra = checkpoint["target"], checkpoint.get("extra", {})
    options = recorded_options(checkpoint)
    k = int(extra.get("decoding", {}).get("num_draft_tokens", 5))
    try:
        measured = about_these_weights(evaluation, layout.quantization)
        advice = ((measured or {}).get("advice") or [{}])[0]
        k = int(advice.get("num_speculative_tokens") or k)
        values = {"measured": measured, "advice": advice, "engine": engine}
        acceptance = render("export/templates/acceptance.md.jinja", **values)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, TemplateError) as error:
        wrong = f"{evaluation} is not an evaluation that specdraft wrote ({type(error).__name__}: {error})"
        raise UserError(f"{wrong}: remove it or run evaluate.py again") from error
    k = min(k, layout.longest_draft or k)
    # An engine knows no embedded:// names, it wants the folder; and it may be started in another one than this.
    served = location(target["name"])
    served = str(Path(served).resolve()) if Path(served).is_dir() else served
    return render(
        "export/templates/card.md.jinja",
        layout=layout,
        engine=engine,
        target=target,
        template_options=options,
        data=extra.get("data", {}),
        k=k,
        version=checkpoint.get("specdraft_version", "unknown"),
        usage=engine.usage(layout, served, str(directory), k, options, advice.get("tree")).rstrip(),
        acceptance=acceptance,
    )
