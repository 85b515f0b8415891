"""Why is a drafter hardly ever accepted when served? The usual reasons, each looked for by name."""

from collections.abc import Sequence

from specdraft.data.sources.prompts import Prompt
from specdraft.doctor.files import check_files
from specdraft.doctor.findings import Finding, Level, report
from specdraft.doctor.loaded_drafter import LoadedDrafter, Serving
from specdraft.doctor.probes import check_by_computing
from specdraft.targets.loading import load_tokenizer, template_hash

__all__ = ["Finding", "Level", "LoadedDrafter", "Serving", "report", "run_checks"]


def run_checks(
    loaded: LoadedDrafter, prompts: Sequence[Prompt], serving: Serving | None = None, max_new_tokens: int = 64
) -> list[Finding]:
    """Every check that applies to this drafter. ``prompts``: of the traffic that will be served.

    Raises UserError for a serving tokenizer that cannot be read and for prompts that do not fit the context.
    """
    serving = serving or Serving()
    tokenizer = load_tokenizer(serving.tokenizer) if serving.tokenizer else loaded.target.tokenizer
    loaded.drafter.eval()
    return [
        *check_files(loaded, serving, template_hash(tokenizer)),
        *check_by_computing(loaded, serving, prompts, max_new_tokens),
    ]
