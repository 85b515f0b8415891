"""vLLM with a drafter of ours inside it: the settings that it is started with, for what drafts from tokens alone.

The directory holds ``vllm.yaml``, which ``vllm serve --config`` reads, a card with the same on one line, and a copy of
the draft model's checkpoint, if there is one."""

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from specdraft.drafters.checkpoint import CONFIG, WEIGHTS, find
from specdraft.drafters.hybrid import Hybrid
from specdraft.errors import UserError
from specdraft.files import atomic_directory
from specdraft.rendering import render
from specdraft.serving.settings import ProposerSettings
from specdraft.targets.loading import location

PROPOSER = "specdraft.serving.vllm.Proposer"
SETTINGS, CARD, CHECKPOINT = "vllm.yaml", "README.md", "drafter"


def speculative_config(num_draft_tokens: int) -> dict[str, Any]:
    """Of vLLM: it loads the class of that name."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_draft_tokens}


def chain_rule(shape: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The rule that ends chains, of a shape as ``conf/decoding/shape`` describes it. Raises UserError for a tree."""
    if shape is not None and not str(shape["_target_"]).endswith(".chain"):
        wanted = "chain, confident_chain, entropy_chain, goodput_chain or learned_chain"
        raise UserError(f"decoding/shape is made by {shape['_target_']}, but vLLM verifies chains: expected {wanted}")
    return None if shape is None else shape.get("stop")


def export_proposer(
    settings: ProposerSettings,
    target: str,
    num_draft_tokens: int,
    output: Path,
    template_options: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``output``, whole or not at all, and return it. target: a model's name or folder. template_options: what
    its chat template is rendered with.

    Raises UserError for settings that no proposer can be built from, and for an output directory that holds other
    files."""
    _check_output(output)
    drafter, stop = settings.build()
    source = None if settings.checkpoint is None else find(settings.checkpoint)
    if source is not None:
        settings = replace(settings, checkpoint=str(output.resolve() / CHECKPOINT))
    started: dict[str, Any] = {
        "model": location(target),
        "speculative-config": speculative_config(num_draft_tokens),
        "additional-config": settings.entry(),
    }
    if template_options:
        started["default-chat-template-kwargs"] = dict(template_options)
    options = " ".join(
        f"--{name} {shlex.quote(json.dumps(value))}" for name, value in started.items() if name != "model"
    )
    title = f"{drafter.retrieval.family}, else {drafter.head.family}" if isinstance(drafter, Hybrid) else drafter.family
    values = {"title": title, "stop": stop, "target": target, "options": options, "started": started}
    card = render("export/templates/proposer.md.jinja", settings=output.resolve() / SETTINGS, **values)
    with atomic_directory(output) as temporary:
        (temporary / SETTINGS).write_text(OmegaConf.to_yaml(started), encoding="utf-8")
        (temporary / CARD).write_text(card, encoding="utf-8")
        if source is not None:
            (temporary / CHECKPOINT).mkdir()
            for name in (CONFIG, WEIGHTS):
                shutil.copyfile(source / name, temporary / CHECKPOINT / name)
    return output


def _check_output(output: Path) -> None:
    held = (
        {entry.name for entry in output.iterdir()} if output.is_dir() else {output.name} if output.exists() else set()
    )
    if held and not {SETTINGS, CARD} <= held <= {SETTINGS, CARD, CHECKPOINT}:
        wrong = f"{output} exists and is not an earlier export (it holds {', '.join(sorted(held)[:3])})"
        raise UserError(f"{wrong}: expected a new or empty directory, or an earlier export, which is replaced")
