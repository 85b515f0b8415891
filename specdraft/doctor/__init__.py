"""Why is a drafter hardly ever accepted when served? The usual reasons, each looked for by name."""

from specdraft.doctor.examine import examine
from specdraft.doctor.findings import Finding, Level, report
from specdraft.doctor.patient import Patient, Serving

__all__ = ["Finding", "Level", "Patient", "Serving", "examine", "report"]
