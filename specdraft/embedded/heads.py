"""Put a trained drafter into the package: ``python -m specdraft.embedded.heads RUN DIR``.

``DIR`` is ``specdraft/embedded/NAME``, and the drafter then ``embedded://NAME`` everywhere, in bf16, with a model card
of the settings that made it and of what was measured: by the run's own evaluation, or by ``--evaluation DIR``."""

import argparse
import json
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from specdraft.drafters.checkpoint import CONFIG, WEIGHTS, find, load_drafter
from specdraft.errors import UserError, exit_on_user_error
from specdraft.export.engine import GREEDY
from specdraft.files import atomic_directory, member, read_json
from specdraft.rendering import render
from specdraft.tensors import read_tensors

LIMIT = 20_000_000  # bytes: what a package may reasonably carry


def embed(run: Path, directory: Path, command: str, evaluation: Path | None = None, limit: int = LIMIT) -> Path:
    """Write the best drafter of ``run`` into ``directory``, whole or not at all; as many tokens are drafted with it as
    its evaluation advises, that of the directory ``evaluation`` if it was evaluated later. Raises UserError for a run
    without a drafter or an evaluation, and for one of more than ``limit`` bytes."""
    source = find(run)
    _, config = load_drafter(source)  # checks it
    tensors = read_tensors(member(source, WEIGHTS))
    halved = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in halved.values())
    if size > limit:
        mend = "choose a smaller model.draft_vocab_size or model.drafter.intermediate_size"
        raise UserError(f"the drafter of {run} has {size:,} bytes in bfloat16: expected at most {limit:,}; {mend}")
    measured = read_json((evaluation or source.parent) / "evaluation.json")
    measured["settings"].pop("checkpoint", None)  # where it lay when it was measured
    advice = (measured.get("advice") or [{}])[0]
    if k := advice.get("num_speculative_tokens"):
        config["extra"]["decoding"]["num_draft_tokens"] = k
    card = render(
        "embedded/head.md.jinja",
        name=directory.name.replace("_", "-"),
        config=config,
        settings=_settings(source.parent),
        command=command,
        parameters=sum(tensor.numel() for tensor in halved.values() if tensor.is_floating_point()),
        size=size,
        measured=measured,
        advice=advice,
        engine={"name": "vLLM", "drafting": GREEDY},
    )
    with atomic_directory(directory) as temporary:
        save_file(halved, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (temporary / "README.md").write_text(card, encoding="utf-8")
    return directory


def _settings(run: Path) -> DictConfig:
    """The configuration that the run was started with."""
    found = OmegaConf.load(member(run, ".hydra/config.yaml"))
    assert isinstance(found, DictConfig)
    return found


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory with a drafter and its evaluation")
    parser.add_argument("directory", type=Path, help="the folder to write")
    parser.add_argument("--command", required=True, help="how the run was made, for the card")
    parser.add_argument("--evaluation", type=Path, help="where evaluate.py wrote what it measured (default: RUN)")
    arguments = parser.parse_args()
    print(embed(arguments.run, arguments.directory, arguments.command, arguments.evaluation))


if __name__ == "__main__":
    main()
