"""The README.md beside exported weights: whose head it is, how it is served, and what was measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdraft.errors import UserError
from specdraft.export.engine import Engine
from specdraft.targets.loading import location


def model_card(
    checkpoint: Mapping[str, Any], config: Mapping[str, Any], engine: Engine, directory: Path, evaluation: Path | None
) -> str:
    """Markdown. ``checkpoint`` and ``config`` are the two config.json, of the checkpoint and of the exported head."""
    target = checkpoint["target"]
    k = num_draft_tokens(checkpoint)
    facts = {
        "target": f"`{target['name']}`",
        "target revision": target["revision"] or "not pinned",
        "target config hash": f"`{target['config_hash']}`",
        "auxiliary layers": f"{config['eagle_aux_hidden_state_layer_ids']} (hidden states after so many layers)",
        "draft vocabulary": f"{config['draft_vocab_size']} of {config['vocab_size']} tokens",
        "draft tokens per round (K)": str(k),
        "weights": config["torch_dtype"],
        "specdraft": checkpoint.get("specdraft_version", "unknown"),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    # An engine knows no embedded:// names, it wants the folder.
    usage = engine.usage(location(target["name"]), str(directory), k, config["torch_dtype"])
    return (
        f"# EAGLE-3 head for {target['name']}\n\n"
        "A draft head for speculative decoding. It works with this target only; the output is the target's own.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n## Serving with {engine.name}\n\n{usage}\n## Acceptance\n\n"
        + _acceptance(evaluation)
    )


def num_draft_tokens(checkpoint: Mapping[str, Any]) -> int:
    """K, as the checkpoint was trained and measured with."""
    return int(checkpoint.get("extra", {}).get("decoding", {}).get("num_draft_tokens", 5))


def _acceptance(evaluation: Path | None) -> str:
    if evaluation is None:
        return "Not measured: no evaluation.json lay beside the checkpoint.\n"
    try:
        measured = json.loads(evaluation.read_text(encoding="utf-8"))
        settings, results = measured["settings"], measured["results"]
        lines = [
            f"| {row['drafter']} | {row['temperature']:g} | {_number(row['acceptance_length'], 2)} | "
            f"{_number(row['draft_acceptance_rate'], 3)} | {_number(row['speedup'], 2)} | "
            f"{', '.join(_number(rate, 2) for rate in row['conditional_acceptance_rate'])} |"
            for row in results
        ]
        title = (
            f"{settings['prompts']} prompts of {settings.get('benchmark', 'an unnamed benchmark')}, up to "
            f"{settings['max_new_tokens']} tokens each, {settings['draft_tree']}, measured by specdraft's own decoding "
            f"loop ({settings['dtype']} on {settings['device']}), {measured['created']}.\n\n"
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{evaluation} is not an evaluation that specdraft wrote ({type(error).__name__}: {error}): "
            "remove it or run evaluate.py again"
        ) from error
    head = (
        "| drafter | temperature | acceptance length | draft acceptance rate | speedup | "
        "conditional acceptance rate by position |\n|---|---|---|---|---|---|\n"
    )
    return title + head + "\n".join(lines) + "\n"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
