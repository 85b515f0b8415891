"""Under ZeRO-3 every rank must call the same modules in the same order, whatever its batch holds, or all ranks hang.

Each rank is a copy of the drafter; what is compared are the calls, their ends, and the gradients as they arrive.
"""

import copy

import pytest
import torch

from specdraft.check.ranks import calls_of
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.kangaroo import Kangaroo
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.targets.batch import Batch
from tests.drafters.tli.drafts import translating


def adapted(target):
    draft = DraftModel.for_target(target, copy_layers=2)
    draft.adapt({"r": 2})
    return draft


IDS = torch.arange(3, 97, 2)
FAMILIES = {
    "eagle": Eagle.for_target,
    "eagle, unrolled": lambda target: Eagle.for_target(target, ttt_steps=3),
    "eagle3": lambda target: Eagle3.for_target(target, IDS, ttt_steps=4),
    "eagle3.1": lambda target: Eagle3.for_target(target, IDS, ttt_steps=4, fc_norm=True, norm_output=True),
    "eagle3, two layers": lambda target: Eagle3.for_target(
        target, IDS, ttt_steps=4, num_layers=2, norm_before_fc=True, qk_norm=True, own_embedding=True, sliding_window=8
    ),
    "medusa": lambda target: Medusa.for_target(target, IDS, num_heads=3, num_layers=2),
    "hydra": lambda target: Hydra.for_target(target, IDS, num_heads=3, num_layers=2),
    "redrafter": lambda target: ReDrafter.for_target(target, IDS, ttt_steps=3, exit_size=40),
    "mtp": lambda target: MTP.for_target(target),
    "p_eagle": lambda target: PEagle.for_target(target, IDS, ttt_steps=4, num_layers=2, sample_positions=True),
    "dflash": lambda target: DFlash.for_target(target, IDS, num_layers=2, block_size=4, num_anchors=8),
    "dspark": lambda target: DSpark.for_target(target, IDS, num_layers=2, block_size=3, num_anchors=8, markov_rank=4),
    "domino": lambda target: Domino.for_target(target, IDS, num_layers=2, block_size=4, num_anchors=8, gru_size=8),
    "kangaroo": Kangaroo.for_target,
    "draft": lambda target: DraftModel.for_target(target, copy_layers=2),
    "draft, checkpointed": lambda target: DraftModel.for_target(target, copy_layers=2, activation_checkpointing=True),
    "draft, lora": adapted,
    "pard": lambda target: Pard.for_target(target, copy_layers=2, num_drafts=4),
    "tli_draft": translating,
}


def batch_of(lengths: list[int], answers: float) -> Batch:
    """A sequence of documents; of each, the last ``answers`` of its tokens are to be learned."""
    ids = torch.randint(0, 97, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    starts = torch.cat([torch.full((length,), length * (1 - answers)) for length in lengths])[None]
    return Batch(ids, positions, documents, positions >= starts)


BATCHES = {
    "short": batch_of([6] * 10, 0.5),
    "long": batch_of([120], 0.5),
    "nothing to learn": batch_of([40, 20], 0.0),
    "all to learn": batch_of([1, 2, 3, 24], 1.0),
    "wide": batch_of([100] * 4, 1.0),  # more queries than a block of attention
}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ranks_call_the_same_modules(family, target):
    torch.manual_seed(0)
    first = FAMILIES[family](target).double().train()
    second = copy.deepcopy(first)
    second.bind(target)
    # Forwards and backwards, so that each batch comes once behind smaller ones and once behind larger ones.
    names = [*BATCHES, *BATCHES]
    for mine, other in zip(names, reversed(names), strict=True):
        ours, theirs = calls_of(first, BATCHES[mine], target), calls_of(second, BATCHES[other], target)
        assert ours == theirs, f"{mine} and {other} differ"
        trained = [name for name, parameter in first.named_parameters() if parameter.requires_grad]
        assert len(ours) > 2 * len(trained) and {f"gradient of {name}" for name in trained} <= set(ours)
