"""What the checks say: one finding each."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """``FAULT``: acceptance suffers, or will. ``NOTE``: worth knowing. ``OK``: looked at, nothing found."""

    OK = "ok"
    NOTE = "note"
    FAULT = "FAULT"


@dataclass(frozen=True)
class Finding:
    """``check`` is the name of what was looked at; ``sentence`` says what was found, expected, and how to mend it."""

    check: str
    level: Level
    sentence: str


def ok(check: str, sentence: str) -> Finding:
    """Looked at, nothing found."""
    return Finding(check, Level.OK, sentence)


def note(check: str, sentence: str) -> Finding:
    """Worth knowing."""
    return Finding(check, Level.NOTE, sentence)


def fault(check: str, sentence: str) -> Finding:
    """Acceptance suffers, or will."""
    return Finding(check, Level.FAULT, sentence)


def report(findings: Sequence[Finding]) -> str:
    """One paragraph per finding, faults last, where a terminal leaves them in sight."""
    width = max(len(finding.check) for finding in findings)
    order = [Level.OK, Level.NOTE, Level.FAULT]
    lines = []
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        head = f"{finding.level:5}  {finding.check:{width}}  "
        lines.append(textwrap.fill(finding.sentence, 110, initial_indent=head, subsequent_indent=" " * len(head)))
    faults = sum(finding.level is Level.FAULT for finding in findings)
    return "\n".join([*lines, "", f"{faults} fault(s) in {len(findings)} checks"])
