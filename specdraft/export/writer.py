"""From a checkpoint to a directory that an engine loads as it is."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import find, load_drafter
from specdraft.drafters.dflash import DFlash, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.drafters.tli import TliDraft
from specdraft.errors import UserError
from specdraft.export import dflash, draft_model, dspark, eagle1, eagle3, medusa, mtp, redrafter
from specdraft.export.engine import Engine
from specdraft.export.layout import DTYPES, Layout, cast
from specdraft.export.model_card import about_these_weights, evaluation_of, model_card
from specdraft.export.provenance import TARGET, provenance
from specdraft.export.quantized import compress
from specdraft.export.tuned_target import export_tuned_target
from specdraft.files import atomic_directory, embedded
from specdraft.targets.weights import Weights

CONFIG, CARD = "config.json", "README.md"
_TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}

# By the class itself: an engine computes what these compute, and not what a class derived from one may.
_LAYOUTS: dict[type[Drafter], Callable[[Any, Mapping[str, Any], str], Layout]] = {
    Eagle3: eagle3.layout,
    Eagle: eagle1.layout,
    PEagle: eagle3.layout,
    MTP: mtp.layout,
    Medusa: medusa.layout,
    ReDrafter: redrafter.layout,
    DFlash: dflash.layout,
    DSpark: dspark.layout,
    DraftModel: draft_model.layout,
    Pard: draft_model.layout,
    TliDraft: draft_model.layout,
}


def export(
    checkpoint: str | Path,
    engine: Engine,
    output: str | Path | None = None,
    quantization: str | None = None,
    served_as: str | None = None,
) -> Path:
    """Write the checkpoint's drafter for ``engine`` and return the directory: whole, or not at all. Of a drafter that
    tunes its target that is written (``tuned_target.py``).

    checkpoint: a drafter's directory, or a run directory that holds one. output: default ``export-ENGINE`` beside the
    drafter's directory, for one inside this package in the current directory. An evaluation.json beside or in the
    checkpoint goes into the model card, if it measured the weights that are written. quantization: of the weights;
    None: as the drafter was trained to compute. served_as: what the card calls the directory; None: its whole path.

    Raises UserError for a checkpoint that is missing or damaged, a drafter that the engine cannot serve, weights that
    are not sound, and an output directory that cannot be written or holds other files."""
    source = find(checkpoint)
    drafter, trained = load_drafter(source, quantization)
    beside = Path() if embedded(str(checkpoint)) else source.parent
    output = Path(output) if output is not None else beside / f"export-{engine.name}"
    if drafter.tunes_target:
        if served_as is not None:
            raise UserError("hub= publishes drafters, and this one has tuned its target: expected export without hub=")
        measured = about_these_weights(evaluation_of(source), None)
        return export_tuned_target(drafter, trained, engine, output, measured)
    _check_output(output)
    target: dict[str, Any] = {"name": trained["target"]["name"], **trained.get("extra", {}).get("target", {})}
    layout = layout_for(drafter, target, engine, output)
    card = model_card(trained, layout, engine, served_as or output.resolve(), evaluation_of(source))
    tensors = layout.tensors | _borrowed(layout, trained["target"])
    with atomic_directory(output) as temporary:
        save_file(tensors, temporary / layout.weights, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(layout.config, indent=2) + "\n", encoding="utf-8")
        (temporary / CARD).write_text(card, encoding="utf-8")
        (temporary / TARGET).write_text(provenance(trained), encoding="utf-8")
        for name, content in layout.files.items():
            (temporary / name).write_bytes(content)
    return output


def check_served(kind: type[Drafter], engine: Engine) -> None:
    """What a class alone tells, before there is a target. Raises UserError for drafters that no engine serves, and for
    those that ``engine`` does not."""
    if kind not in _LAYOUTS:
        raise UserError(
            f"the drafter is a {kind.__name__}, which no serving engine loads: "
            f"expected one of {', '.join(each.__name__ for each in _LAYOUTS)}; train one of those, or set export=null"
        )
    engine.check_family(kind.family)


def layout_for(drafter: Drafter, target: Mapping[str, Any], engine: Engine, output: Path) -> Layout:
    """What ``export`` would write of a drafter, trained or not; ``target`` is what ``about_target`` says of its target.
    Raises UserError for a drafter that the engine cannot serve from the directory ``output``."""
    check_served(type(drafter), engine)
    dtype = target.get("dtype", "float32") if engine.dtype == "auto" else engine.dtype
    if dtype not in DTYPES:
        raise UserError(f"the weights cannot be written as {dtype!r}: expected engine.dtype to be {', '.join(DTYPES)}")
    layout = _LAYOUTS[type(drafter)](drafter, target, dtype)
    return engine.accept(layout if drafter.quantization is None else compress(layout, drafter), target, output)


def _borrowed(layout: Layout, target: Mapping[str, Any]) -> dict[str, Tensor]:
    """The target's tensors that go into the file. Raises UserError for a target whose files are not at hand."""
    if not layout.borrowed:
        return {}
    files, found = Weights(target["name"], target.get("revision")), {}
    for name, end in layout.borrowed.items():
        # A projection that is tied to the embedding is not in the files.
        theirs = files.ending(end) or files.ending("embed_tokens.weight")
        if theirs is None:
            wrong = f"the files of the target {target['name']!r} name no {end}"
            raise UserError(f"{wrong}: expected an embedding and a projection of such names, which the engine shares")
        found[name] = files.read([theirs])[theirs]
    return cast(found, layout.dtype)


def _check_output(output: Path) -> None:
    # The directory is replaced as a whole: `output=.` must not cost anyone their files.
    if not output.exists():
        return
    held = {entry.name for entry in output.iterdir()} if output.is_dir() else {output.name}
    written = [{CONFIG, CARD, weights} for weights in ("model.safetensors", medusa.WEIGHTS)]
    if held and held - _TOKENIZER - {TARGET} not in written:
        wrong = f"{output} exists and is not an earlier export (it holds {', '.join(sorted(held)[:3])})"
        raise UserError(f"{wrong}: expected a new or empty directory, or an earlier export, which is replaced")
