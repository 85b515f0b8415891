"""Checkpoints of every family as this version writes them, kept for later ones: ``make version-files``.

They are written once, when a version is released, into a folder of its name, with what decoding with each gives."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import specdraft
from specdraft.decoding.decoder import Decoder
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import about_target, save_drafter
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.files import atomic_directory
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama

FOLDER = Path(__file__).parent
EXPECTED = "decoded.json"
VOCABULARY = torch.arange(0, 64, 3)
FAMILIES: Mapping[str, Callable[[Target], Drafter]] = {
    "eagle": Eagle.for_target,
    "eagle3": lambda target: Eagle3.for_target(target, VOCABULARY, layers=(1, 2)),
    "eagle3_1": lambda target: Eagle3.for_target(target, None, layers=(1, 2), fc_norm=True, norm_output=True),
    "medusa": lambda target: Medusa.for_target(target, VOCABULARY, num_heads=3),
    "hydra": lambda target: Hydra.for_target(target, VOCABULARY, num_heads=3),
    "redrafter": lambda target: ReDrafter.for_target(target, VOCABULARY),
    "mtp": MTP.for_target,
    "p_eagle": lambda target: PEagle.for_target(target, VOCABULARY, layers=(1, 2), num_layers=2, ttt_steps=4),
    "dflash": lambda target: DFlash.for_target(target, VOCABULARY, layers=(1, 2), num_layers=1, block_size=5),
    "dspark": lambda target: DSpark.for_target(target, VOCABULARY, layers=(1, 2), num_layers=1, block_size=4),
    "domino": lambda target: Domino.for_target(
        target, VOCABULARY, layers=(1, 2), num_layers=1, block_size=5, gru_size=16, rank=16
    ),
    "draft": lambda target: DraftModel.for_target(target, copy_layers=1),
    "pard": lambda target: Pard.for_target(target, copy_layers=1, num_drafts=4),
}


def target() -> Target:
    """The same on every machine and in every version."""
    return Target.from_model(tiny_llama(), name="tests/versions")


def decode(drafter: Drafter) -> list[list[list[int]]]:
    """Some greedy answers: what was drafted in each round, how much of it was accepted, and the target's own token."""
    decoder = Decoder(target(), drafter.eval(), 4, trace=True)
    found = decoder.generate_batch(random_prompts(3, (5, 9, 14)), 24, 1)
    traces = [each.trace for each in found if each.trace is not None]
    return [[[*each.drafted, each.accepted, each.next_token] for each in trace.rounds] for trace in traces]


def main() -> None:
    """Write the folder of this version. Ends with a sentence if it is there: what was released stays."""
    folder = FOLDER / specdraft.__version__
    if folder.exists():
        sys.exit(f"error: {folder} holds what {specdraft.__version__} has written: expected a new version")
    with atomic_directory(folder) as temporary:
        for number, (name, make) in enumerate(FAMILIES.items()):
            torch.manual_seed(number)
            mine = target()
            drafter = make(mine)
            with torch.no_grad():  # large random weights: every part must matter
                for parameter in drafter.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            extra = {"decoding": {"num_draft_tokens": 4}, "target": about_target(mine)}
            directory = save_drafter(drafter, temporary / name, mine.identity, extra)
            (directory / EXPECTED).write_text(json.dumps(decode(drafter)) + "\n", encoding="utf-8")
    print(folder)


if __name__ == "__main__":
    main()
