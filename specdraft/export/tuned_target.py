"""A target that a drafter has tuned, as an ordinary model directory: what engines serve, and ``target.name=DIR`` loads.

Of its drafter nothing is left: it drafts by Jacobi decoding, which no engine does and ``drafter=jacobi`` does here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, recorded_options
from specdraft.errors import UserError
from specdraft.export.engine import Engine
from specdraft.export.layout import DTYPES, check_finite
from specdraft.files import atomic_directory
from specdraft.rendering import render
from specdraft.targets import Target

CARD = "README.md"


def export_tuned_target(
    drafter: Drafter, trained: Mapping[str, Any], engine: Engine, output: Path, measured: Mapping[str, Any] | None
) -> Path:
    """Write ``output``: configuration, merged weights, tokenizer and a card; whole, or not at all. trained: the
    checkpoint's configuration. measured: its evaluation, if there is one. Raises UserError for a target that is not
    there or another one, for weights that are not finite, and for an ``output`` that holds something."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists: a tuned target is written to a new or empty directory; choose with output=")
    about = trained["target"]
    dtype = trained.get("extra", {}).get("target", {}).get("dtype", "float32")
    dtype = dtype if engine.dtype == "auto" else engine.dtype
    target = Target.load(about["name"], about["revision"], dtype="float32", device="cpu", packed=False)
    check_target(dict(trained), target)
    model = drafter.tuned(target).model.to(DTYPES[dtype])
    check_finite(model.state_dict(), dtype)
    tuning = (measured or {}).get("settings", {}).get("tuning")
    values = {"target": about["name"], "engine": engine.name, "directory": str(output.resolve()), "tuning": tuning}
    values["template_options"] = recorded_options(trained)
    with atomic_directory(output) as temporary:
        model.save_pretrained(temporary)
        target.tokenizer.save_pretrained(temporary)
        (temporary / CARD).write_text(render("export/templates/tuned_target.md.jinja", **values), encoding="utf-8")
    return output
