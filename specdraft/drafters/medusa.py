"""Medusa (2401.10774): heads that each read the target's last hidden state, and nothing of each other's tokens.

All levels of a draft come from one hidden state at once. A head cannot know what was drafted above it, so its tokens
are best laid out as a tree of the likeliest combinations (section 2.1.2; ``decoding/shape=measured_tree``). Here
the target stays frozen: Medusa-1."""

from torch import Tensor

from specdraft.drafters.heads import Heads


class Medusa(Heads):
    """Medusa's heads; the state-dict names are those of vLLM's ``medusa`` method."""

    reads_path = False

    @staticmethod
    def num_read(head: int) -> int:
        """The hidden state."""
        return 1

    def hidden(self, head: int, last: Tensor, path: Tensor) -> Tensor:
        """As ``last``, whatever the path."""
        return self.blocks[head](last)
