"""Hydra (2402.05109): Medusa's heads made sequential, each reading the tokens drafted before its own.

Head i reads the last hidden state and the target's embeddings of the i+1 tokens since: the one that the target emitted
from it and those drafted on the node's own path (section 3). The embedding is borrowed, never copied.

The embeddings are brought to unit RMS first. Those of the embedded target are 25 times smaller than the hidden state
beside them, and a layer that begins with zeros learns to hear them late: after 100 steps the expected acceptance of
the second drafted token was 0.25, and 0.38 with unit RMS."""

import torch
from torch import Tensor, nn

from specdraft.drafters.heads import Heads


class Hydra(Heads):
    """Hydra's heads: the first layer of head i is ``(i+2)*H`` wide, the rest as Medusa's."""

    reads_path = True

    @staticmethod
    def num_read(head: int) -> int:
        """The hidden state and one embedding per token of the path."""
        return head + 2

    def hidden(self, head: int, last: Tensor, path: Tensor) -> Tensor:
        """``[n, H]``: every path has its own."""
        embedded = nn.functional.embedding(path, self.target.embedding_weight).to(last.dtype)  # [n, head + 1, H]
        embedded = nn.functional.rms_norm(embedded, embedded.shape[-1:], eps=1e-6)
        return self.blocks[head](torch.cat([last[:, None], embedded], dim=1).flatten(1))
