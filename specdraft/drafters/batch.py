"""The packed batch that data loaders yield and training consumes.

B = rows, T = tokens in a row. A row holds several documents side by side; nothing may attend across them.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdraft.targets import Features, Target

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter


@dataclass
class Batch:
    """Packed documents.

    ``position_ids`` restart at 0 with every document. ``document_ids`` are distinct within a row; padding has
    document -1 and is never supervised. ``loss_mask`` is True on the tokens to learn: those of the assistant,
    its end mark included.
    """

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor  # [B, T] int64
    document_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def features(self, target: Target, drafter: "Drafter") -> Features:
        """What the drafter reads of the target: computed here, read from a store by batches that come from one."""
        return target.features(self.input_ids, self.position_ids, drafter.layers)
