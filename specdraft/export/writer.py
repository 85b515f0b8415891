"""From a checkpoint to a directory that an engine loads as it is."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from specdraft.drafters.checkpoint import find, load_drafter
from specdraft.drafters.eagle3 import Eagle3
from specdraft.errors import UserError
from specdraft.export.engine import Engine
from specdraft.export.layout import layout_config, layout_tensors, validate
from specdraft.export.model_card import model_card
from specdraft.files import atomic_directory

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


def export(checkpoint: str | Path, engine: Engine, output: str | Path | None = None) -> Path:
    """Write the checkpoint's head for ``engine`` and return the directory: whole, or not at all.

    checkpoint: a drafter's directory, or a run directory that holds one. output: default ``export-ENGINE`` beside the
    drafter's directory. An evaluation.json beside or in the checkpoint goes into the model card.

    Raises UserError for a checkpoint that is missing or damaged, a drafter that the engine cannot serve, weights that
    are not sound, and an output directory that cannot be written or holds other files.
    """
    source = find(checkpoint)
    drafter, trained = load_drafter(source)
    if not isinstance(drafter, Eagle3):
        raise UserError(
            f"the checkpoint holds a drafter of the kind {type(drafter).__name__}, which cannot be exported for "
            f"{engine.name}: expected an Eagle3"
        )
    output = Path(output) if output is not None else source.parent / f"export-{engine.name}"
    _check_output(output)
    target: dict[str, Any] = trained.get("extra", {}).get("target", {})
    engine.check_target(target.get("architecture", "unknown"))
    dtype = target.get("dtype", "float32") if engine.dtype == "auto" else engine.dtype
    special_ids = {key: target.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = layout_config(drafter.config(), dtype, special_ids)
    tensors = layout_tensors(drafter.state_dict(), config)
    validate(config, tensors, target.get("num_hidden_layers"))
    evaluation = next((path for path in _evaluations(source) if path.is_file()), None)
    card = model_card(trained, config, engine, output, evaluation)
    with atomic_directory(output) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (temporary / CARD).write_text(card, encoding="utf-8")
    return output


def _evaluations(checkpoint: Path) -> tuple[Path, Path]:
    return checkpoint / "evaluation.json", checkpoint.parent / "evaluation.json"


def _check_output(output: Path) -> None:
    # The directory is replaced as a whole: `output=.` must not cost anyone their files.
    if not output.exists():
        return
    held = {entry.name for entry in output.iterdir()} if output.is_dir() else {output.name}
    if held and held != {CONFIG, WEIGHTS, CARD}:
        raise UserError(
            f"{output} exists and is not an earlier export (it holds {', '.join(sorted(held)[:3])}): "
            "expected a new or empty directory, or an earlier export, which is replaced"
        )
