"""The whole examination."""

from collections.abc import Sequence

from specdraft.data.sources.prompts import Prompt
from specdraft.doctor.files import examine_files
from specdraft.doctor.findings import Finding
from specdraft.doctor.loaded_drafter import LoadedDrafter, Serving
from specdraft.doctor.probes import examine_by_computing
from specdraft.targets.loading import load_tokenizer, template_hash


def run_checks(
    patient: LoadedDrafter, prompts: Sequence[Prompt], serving: Serving | None = None, max_new_tokens: int = 64
) -> list[Finding]:
    """Every check that applies to this drafter. ``prompts``: of the traffic that will be served.

    Raises UserError for a serving tokenizer that cannot be read and for prompts that do not fit the context.
    """
    serving = serving or Serving()
    tokenizer = load_tokenizer(serving.tokenizer) if serving.tokenizer else patient.target.tokenizer
    patient.drafter.eval()
    return [
        *examine_files(patient, serving, template_hash(tokenizer)),
        *examine_by_computing(patient, serving, prompts, max_new_tokens),
    ]
