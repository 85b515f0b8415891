"""The packed batch that data loaders yield and training consumes.

B = sequences, T = tokens of a sequence, which holds several documents; nothing may attend across them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specdraft.targets.language_model import Features
from specdraft.targets.server import Connection
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

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device; a copy to a GPU is not waited for, where the memory is pinned."""
        on_gpu = torch.device(device).type == "cuda"
        return self._each(lambda tensor: tensor.to(device, non_blocking=on_gpu))

    def pin_memory(self) -> Self:
        """The same batch in memory that a GPU copies from while others compute."""
        return self._each(Tensor.pin_memory)

    def _each(self, convert: Callable[[Tensor], Tensor]) -> Self:
        done: dict[int, Tensor] = {}  # what is the same tensor stays the same

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = convert(tensor)
            return done[id(tensor)]

        return replace(self, **tree_map_only(Tensor, once, vars(self)))

    def before_learned(self) -> Tensor:
        """Bool ``[B, T]``, the positions whose next token is to be learned and of the same document."""
        documents = self.document_ids
        follows = self.loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
        return torch.nn.functional.pad(follows, (0, 1))

    def features(self, target: Target, layers: Sequence[int], every_last: bool = True) -> Features:
        """The target's hidden states of ``layers`` and its last ones: computed here, read by batches from a store.
        ``every_last``: the last ones of every position, not only of those before a token to be learned."""
        return target.features(self.input_ids, self.position_ids, layers)


@dataclass
class ReadBatch(Batch):
    """A batch that a server has read before it was asked for; ``read`` are the ids that it was given."""

    connection: Connection
    read: Tensor  # [B, T] int64
    states: Tensor  # [B, T, a+1, H], as ``Connection.read`` gives them

    @classmethod
    def of(cls, batch: Batch, connection: Connection) -> Batch:
        """The batch, read now; as it is, once a drafter was seen to train on other text than was read."""
        if not connection.foresees:
            return batch
        states = connection.read(batch.input_ids, batch.position_ids)
        return cls(**vars(batch), connection=connection, read=batch.input_ids, states=states)

    def features(self, target: Target, layers: Sequence[int], every_last: bool = True) -> Features:
        """What the server has read, or what it reads now if the drafter has changed the text."""
        if self.read is self.input_ids and tuple(layers) == self.connection.layers:
            return self.connection.finish(self.states)
        self.connection.foresees = False
        return super().features(target, layers, every_last)
