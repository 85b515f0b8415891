"""What a check reads, the drafter as it is loaded and will be served, and what it says: a finding."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import CONFIG, find, load_drafter
from specdraft.errors import UserError
from specdraft.export.importing import import_head
from specdraft.export.layout import DTYPES
from specdraft.export.provenance import read_provenance
from specdraft.files import embedded, read_json
from specdraft.targets import Target

DRAFT_TOKENS = 5  # where the checkpoint does not say


class Level(StrEnum):
    """``OK``: nothing found. ``NOTE``: worth knowing. ``FAULT``: acceptance suffers, or will."""

    OK = "ok"
    NOTE = "note"
    FAULT = "FAULT"


@dataclass(frozen=True)
class Finding:
    """What a check found, what was expected, and how to mend it."""

    level: Level
    sentence: str


ok, note, fault = (partial(Finding, level) for level in Level)


@dataclass(frozen=True)
class Serving:
    """How the drafter will be served; None stands for as it was trained."""

    tokenizer: str | None = None  # path of the tokenizer and its chat template
    system_prompt: str | None = None
    max_model_len: int | None = None  # longest context in tokens
    dtype: str | None = None  # of the weights
    temperature: float | None = None


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter bound to its target, with the configuration of its checkpoint or, of an export, the engine's.
    provenance: what an export says of the target that it was trained for, as a checkpoint says it."""

    drafter: Drafter
    target: Target
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    exported: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path, target: Target) -> "LoadedDrafter":
        """From a run, a drafter's directory, or what was exported or published.
        Raises UserError for anything else, and for a drafter whose files contradict each other."""
        if is_checkpoint(path):
            drafter, config = load_drafter(path)
            if drafter.tunes_target:
                wanted = "a drafter; evaluate.py measures what the target has lost"
                raise UserError(f"{path} tunes its target, which the doctor takes as it is: expected {wanted}")
            drafter.to(target.device, target.dtype)
            drafter.bind(target)
            return cls(drafter, target, checkpoint=config)
        said = read_provenance(path)
        head = import_head(path, target).to(target.device, target.dtype)
        return cls(head, target, exported=read_json(Path(path) / CONFIG), provenance=said)

    @property
    def settings_known(self) -> bool:
        """Whether its settings are for certain those of its training: a run wrote them, no engine's files did."""
        return bool(self.checkpoint) and "imported_from" not in self.checkpoint.get("extra", {})

    def recorded(self, part: str, key: str) -> Any:
        """What the checkpoint, or an export of its target, says of data, decoding, training or target, or None."""
        return (self.checkpoint or self.provenance).get("extra", {}).get(part, {}).get(key)

    def served_dtype(self, serving: Serving) -> str:
        """That of ``serving``, else the export's, else bfloat16. Raises UserError for an unknown one."""
        name = serving.dtype or self.exported.get("torch_dtype") or "bfloat16"
        if name not in DTYPES:
            raise UserError(f"serving.dtype is {name!r}: expected one of {', '.join(DTYPES)}")
        return name


def is_checkpoint(path: str | Path) -> bool:
    """Whether ``path`` holds a specdraft checkpoint rather than an export. Raises UserError for neither."""
    if embedded(str(path)) or not (Path(path) / CONFIG).is_file():
        return bool(find(path))
    config = read_json(Path(path) / CONFIG)
    return isinstance(config, dict) and "drafter" in config


def report(findings: Mapping[str, Finding]) -> str:
    """One paragraph per check; faults come last, where they stay in sight on a terminal."""
    width, lines = max(map(len, findings)), []
    for check, finding in sorted(findings.items(), key=lambda item: list(Level).index(item[1].level)):
        head = f"{finding.level:5}  {check:{width}}  "
        lines.append(textwrap.fill(finding.sentence, 110, initial_indent=head, subsequent_indent=" " * len(head)))
    faults = sum(finding.level is Level.FAULT for finding in findings.values())
    return "\n".join([*lines, "", f"{faults} fault(s) in {len(findings)} checks"])
