"""An export on a model hub: the files that an engine loads, the card with the hub's metadata, and what was measured."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

import specdraft
from specdraft.errors import UserError
from specdraft.export.model_card import EVALUATION
from specdraft.text import reason

_METRICS = ("acceptance_length", "draft_acceptance_rate", "speedup")


def check_repository(name: str) -> None:
    """Raises UserError for a name that is no USER/NAME, and where nobody is logged in."""
    try:
        validate_repo_id(name)
        whole = name.count("/") == 1
    except HFValidationError:
        whole = False
    if not whole:
        raise UserError(f"hub is {name!r}: expected USER/NAME, letters, digits, '-', '_' and '.'")
    if get_token() is None:
        raise UserError(f"hub={name} needs an account: expected a token; run `hf auth login`, or set HF_TOKEN")


def publish(
    directory: Path,
    name: str,
    engine: str,
    checkpoint: Mapping[str, Any],
    measured: Mapping[str, Any] | None,
    private: bool | None = None,
) -> str:
    """Push a ``directory`` exported for ``engine`` in one commit and return its address. ``checkpoint`` is the
    config.json of the checkpoint, ``measured`` what its evaluation.json holds, if that is about these weights.
    ``private``: None leaves it to the account. An existing repository gets a further commit. Raises UserError if the
    hub refuses it."""
    readme = "README.md"
    metadata = _metadata(name, engine, checkpoint, measured).to_yaml()
    card = f"---\n{metadata}\n---\n\n{(directory / readme).read_text(encoding='utf-8')}"
    files: dict[str, Any] = {each.name: each for each in directory.iterdir() if each.name != readme}
    files[readme] = card.encode()
    if measured is not None:
        files[EVALUATION] = json.dumps(measured, indent=2).encode()
    operations = [CommitOperationAdd(name, content) for name, content in sorted(files.items())]
    try:
        hub = HfApi(library_name="specdraft", library_version=specdraft.__version__)
        hub.create_repo(name, private=private, exist_ok=True)
        hub.create_commit(name, operations, commit_message=f"Written by specdraft {specdraft.__version__}")
    except Exception as error:  # releases of the hub's client differ in the HTTP library whose errors they let through
        said = f"the hub did not take {name} ({reason(error)})"
        mend = "expected a hub that answers, and a token that may write there; what was exported stays"
        raise UserError(f"{said}: {mend} in {directory}") from error
    return f"{hub.endpoint}/{name}"


def _metadata(
    name: str, engine: str, checkpoint: Mapping[str, Any], measured: Mapping[str, Any] | None
) -> ModelCardData:
    family = checkpoint["drafter"]["_target_"].rpartition(".")[2]
    target = checkpoint["target"]["name"]
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", target) is not None and not Path(target).exists()
    return ModelCardData(
        library_name="specdraft",
        base_model=target if on_hub else None,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", family.lower(), engine],
        model_name=name if measured is not None else None,
        eval_results=None if measured is None else list(_results(measured)),
    )


def _results(measured: Mapping[str, Any]) -> Iterator[EvalResult]:
    """What was measured of the drafter under test, the first one of the evaluation."""
    benchmark = str(measured["settings"].get("benchmark", "unnamed"))
    first = measured["results"][0]["drafter"]
    for result in measured["results"]:
        sampling = measured["settings"].get("sampling", {}).get(f"{result['temperature']:g}", {})
        said = sampling.get("said", f"temperature {result['temperature']:g}")
        where = f"{said}, {result.get('drafting', 'sampled')} drafts"
        for metric in _METRICS:
            if result["drafter"] == first and result[metric] is not None:
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=Path(benchmark).name,
                    dataset_name=f"{Path(benchmark).name}, {where}",
                    metric_type=metric,
                    metric_name=metric.replace("_", " "),
                    metric_value=round(float(result[metric]), 4),
                )
