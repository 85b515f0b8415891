"""Why is a drafter hardly ever accepted when served? The usual reasons, each looked for by name."""

from specdraft.doctor.checks import run_checks
from specdraft.doctor.findings import Finding, Level, report
from specdraft.doctor.loaded_drafter import LoadedDrafter, Serving

__all__ = ["Finding", "Level", "LoadedDrafter", "Serving", "report", "run_checks"]
