"""What the doctor's tests share."""

from collections.abc import Mapping

from specdraft.doctor import Finding, Level

VOCAB, LAYERS = 320, (2, 4, 6)
QUESTIONS = [f"def add_{i}(a, b): return a + b + {i}" for i in range(12)]


def faults(findings: Mapping[str, Finding]) -> set[str]:
    """The checks that found a fault."""
    return {check for check, finding in findings.items() if finding.level is Level.FAULT}
