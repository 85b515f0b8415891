"""The drafter in full precision, whatever the strategy has done to its parameters.

DeepSpeed casts the module to the training precision and keeps fp32 masters in its optimizer; ZeRO-3 also cuts the
parameters into pieces. What is decoded with, measured and saved is always the masters.
"""

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

from specdraft.drafters.base import Drafter
from specdraft.training.checkpoints.consolidated import full_state

if TYPE_CHECKING:
    from lightning import Trainer

    from specdraft.training.module import DrafterModule


@torch.no_grad()
def full_precision_drafter(trainer: "Trainer", module: "DrafterModule") -> Drafter:
    """The drafter to decode with and to save: what the trained module, under DeepSpeed a whole copy of it, serves.

    Every rank must call it, because DeepSpeed gathers the masters from all of them.
    """
    drafter = module.drafter
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return drafter.served()
    state = full_state(drafter)
    copy = type(drafter)(**drafter.config())
    copy.load_state_dict(state)
    copy.bind(module.target)
    return copy.to(module.device).served()
