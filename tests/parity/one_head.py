"""One head, exported for vLLM, for comparisons of how it is decoded with."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from engine import Engine, add_arguments
from short import trained

from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import find, load_drafter
from specdraft.export import export
from specdraft.export.engine import GREEDY
from specdraft.export.vllm import VLLM


@dataclass(frozen=True)
class OneHead:
    """engine: with which it is compared. target: the name of its target. directory: of its export. K drafts in a round.
    prompts: how many are asked for."""

    engine: Engine
    drafter: Drafter
    target: str
    directory: Path
    num_draft_tokens: int
    prompts: int

    @classmethod
    def of(cls, description: str | None) -> "OneHead":
        """As the command line says: a checkpoint, or a short EAGLE-3 head of the embedded target, trained once. From
        here on one thread computes, as vLLM does beside it. Raises UserError."""
        parser = argparse.ArgumentParser(description=description)
        said = "a checkpoint or run directory; without it a short EAGLE-3 head is trained, once"
        parser.add_argument("--head", help=said)
        add_arguments(parser, "parity")
        options = parser.parse_args()
        engine, k = Engine.of(options), options.num_draft_tokens
        torch.set_num_threads(1)
        checkpoint = find(options.head) if options.head else trained("eagle3", engine.work)
        drafter, config = load_drafter(checkpoint)
        directory = export(checkpoint, VLLM(dtype="float32"), engine.work / "exported" / "one-head").resolve()
        return cls(engine, drafter, config["target"]["name"], directory, k, options.prompts)

    def flags(self, drafting: str = GREEDY) -> str | None:
        """vLLM's speculative configuration with it, as JSON; None if it does not draft so."""
        return VLLM.flags(self.drafter.family, str(self.directory), self.num_draft_tokens, drafting)
