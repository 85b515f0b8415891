"""Why is a drafter hardly ever accepted when served? The usual reasons, one check each."""

from collections.abc import Sequence

from specdraft.data.prompts import Prompt
from specdraft.doctor.checks import Finding, Level, LoadedDrafter, Serving, report
from specdraft.doctor.files import check_files
from specdraft.doctor.probes import check_predictions

__all__ = ["Finding", "Level", "LoadedDrafter", "Serving", "report", "run_checks"]


def run_checks(
    loaded: LoadedDrafter, prompts: Sequence[Prompt], serving: Serving | None = None, max_new_tokens: int = 64
) -> dict[str, Finding]:
    """The finding of each check that applies to this drafter. ``prompts`` resemble the traffic that will be served.
    Raises UserError for a serving tokenizer that cannot be read, an unknown dtype, and prompts that do not fit the
    context."""
    serving = serving or Serving()
    loaded.drafter.eval()
    return check_files(loaded, serving) | check_predictions(loaded, serving, prompts, max_new_tokens)
