"""Which target an export was trained for: ``target.json`` beside the weights.

A file of its own and no key of ``config.json``, which engines and transformers parse into classes of theirs; they load
files by name, and this is none of those names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdraft.drafters.checkpoint import check_target
from specdraft.errors import UserError
from specdraft.files import member, read_json
from specdraft.targets import Target

TARGET = "target.json"
_NAMED = ("name", "config_hash", "weights_hash")
_OPTIONS = "chat_template_options"
# Of what the checkpoint says of the target beside its identity.
_KNOWN = ("quantization", "chat_template_hash", _OPTIONS)


def provenance(trained: Mapping[str, Any]) -> str:
    """The content of the file. ``trained`` is the checkpoint's config.json."""
    known = trained.get("extra", {}).get("target", {})
    return json.dumps({**trained["target"], **{key: known.get(key) for key in _KNOWN}}, indent=2) + "\n"


def read_provenance(directory: str | Path) -> dict[str, Any]:
    """As the checkpoint says it, keys ``target`` and ``extra``; empty for files that do not. Raises UserError for a
    file that was damaged."""
    path = Path(directory) / TARGET
    if not path.is_file():
        return {}
    said = read_json(member(Path(directory), TARGET))
    optional = ("revision", *(key for key in _KNOWN if key != _OPTIONS))
    if (
        not isinstance(said, dict)
        or not all(isinstance(said.get(key), str) for key in _NAMED)
        or not all(isinstance(said.get(key), str | None) for key in optional)
        or not isinstance(said.get(_OPTIONS), dict | None)
    ):
        wanted = f"the texts {', '.join(_NAMED)} as export wrote them"
        raise UserError(f"{path} does not say whose drafter this is: expected {wanted}; restore or remove it")
    known = {key: said[key] for key in _KNOWN if said.get(key) is not None}
    return {"target": {key: said.get(key) for key in ("revision", *_NAMED)}, "extra": {"target": known}}


def check_provenance(directory: str | Path, target: Target) -> dict[str, Any]:
    """What ``read_provenance`` gives. Raises UserError as it does, and for files that were trained for another target
    or for other weights of it."""
    said = read_provenance(directory)
    if said:
        try:
            check_target(said, target)
        except UserError as error:
            raise UserError(f"{error}, or remove {Path(directory) / TARGET} to pair them all the same") from None
    return said
