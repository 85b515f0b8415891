"""The packed batch that data loaders yield and training consumes.

B = sequences, T = tokens of a sequence, which holds several documents; nothing may attend across them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdraft.targets.language_model import Features
from specdraft.targets.target import Target


@dataclass
class Batch:
    """Packed documents. ``position_ids`` restart at 0 with every document. ``document_ids`` are distinct within a
    sequence; padding has document -1 and is never supervised. ``loss_mask`` is True on the tokens to learn: those of
    the assistant, its end mark included."""

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor  # [B, T] int64
    document_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def before_learned(self) -> Tensor:
        """Bool ``[B, T]``, the positions whose next token is to be learned and of the same document."""
        documents = self.document_ids
        follows = self.loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        return torch.nn.functional.pad(follows, (0, 1))

    def features(self, target: Target, layers: Sequence[int], every_last: bool = True) -> Features:
        """The target's hidden states of ``layers`` and its last ones: computed here, read by batches from a store.
        ``every_last``: the last ones of every position, not only of those before a token to be learned."""
        return target.features(self.input_ids, self.position_ids, layers)
