"""The attention of blocks in training: every slot sees the context before its anchor and the slots of its own block.

R = positions of the flat batch, A = anchors, S = slots of a block, Hq / Hk = query / key-value heads, G = Hq // Hk, d =
head size, c = anchors of a chunk, w = context keys that a chunk reads.

All slots of a block see the same context, and no other block. A mask over all slots of all anchors would have A * S
rows and R + A * S columns, almost all of it hidden; here anchors are taken in ascending chunks, whose scores are made
for the keys that the chunk can see and for each block's own, and are made once more for backward."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdraft.drafters.alignment import Documents

SCORES = 2**24  # of one chunk: 64 MB in fp32


class Chunk(NamedTuple):
    """Anchors, and the positions of the batch that one of them sees."""

    anchors: slice
    keys: slice


class Blocks:
    """Where the blocks of a batch stand: their anchors, and what each sees of the context."""

    def __init__(self, anchors: Tensor, documents: Documents, num_slots: int, causal: bool) -> None:
        """anchors: ``[A]`` ascending positions, each the last that its block sees; at least one. causal: whether a slot
        sees those before it in its block, and itself, instead of all."""
        bounds = documents.table[1].long()  # [D + 1]
        self.anchors, self.num_slots, self.causal = anchors, num_slots, causal
        self.begins = bounds[torch.bucketize(anchors, bounds[1:], right=True)]  # [A] the first that it sees
        self._first, self._last = torch.stack([self.begins, anchors]).tolist()  # the one copy to the host

    def chunks(self, heads: int) -> list[Chunk]:
        """Of so many query heads, no more scores than ``SCORES`` at a time, but an anchor's at least."""
        found, start = [], 0
        while start < len(self._last):
            low = self._first[start]  # anchors ascend, and so do their documents
            stop = start + 1
            while stop < len(self._last):
                seen = self._last[stop] + 1 - low + self.num_slots
                if (stop + 1 - start) * heads * self.num_slots * seen > SCORES:
                    break
                stop += 1
            found.append(Chunk(slice(start, stop), slice(low, self._last[stop - 1] + 1)))
            start = stop
        return found

    def attend(self, query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> Tensor:
        """query: ``[A * S, Hq, d]``. context: keys and values ``[R, Hk, d]``; own: those of the slots, ``[A * S, Hk,
        d]`` -> ``[A * S, Hq, d]``."""
        query, key, value = (each.unflatten(0, (-1, self.num_slots)) for each in (query, *own))  # [A, S, heads, d]
        chunks, outputs = self.chunks(query.shape[2]), []
        for anchors, keys in chunks:
            parts = query[anchors], key[anchors], value[anchors], context[0][keys], context[1][keys]
            given = *parts, self.begins[anchors] - keys.start, self.anchors[anchors] - keys.start
            # Of a single chunk the scores are kept: they are few.
            again = len(chunks) > 1 and torch.is_grad_enabled()
            done = checkpoint(self._attend, *given, use_reentrant=False) if again else self._attend(*given)
            outputs.append(done)
        return torch.cat(outputs).flatten(0, 1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, worth: Tensor, begins: Tensor, anchors: Tensor
    ) -> Tensor:
        """Of query ``[c, S, Hq, d]``, key, value ``[c, S, Hk, d]``, context keys and values ``seen``, ``worth [w, Hk,
        d]``, and ``begins``, ``anchors [c]``, the first and the last of them that a block sees: ``[c, S, Hq, d]``."""
        query = query.to(value.dtype).unflatten(2, (key.shape[2], -1)).permute(2, 0, 1, 3, 4)  # [Hk, c, S, G, d]
        key, value = (each.to(value.dtype).permute(2, 0, 1, 3) for each in (key, value))  # [Hk, c, S, d]
        seen, worth = (each.to(value.dtype).transpose(0, 1) for each in (seen, worth))  # [Hk, w, d]
        _, count, slots, groups, _ = query.shape
        accumulator = torch.promote_types(value.dtype, torch.float32)
        before = query.flatten(1, 3) @ seen.transpose(1, 2)  # [Hk, c * S * G, w]
        before = before.unflatten(1, (count, slots * groups)).to(accumulator)  # [Hk, c, S * G, w]
        within = (query.flatten(2, 3) @ key.transpose(2, 3)).to(accumulator)  # [Hk, c, S * G, S]
        place = torch.arange(seen.shape[1], device=seen.device)
        hidden = (place > anchors[:, None]) | (place < begins[:, None])  # [c, w]
        before = before.masked_fill(hidden[:, None], -torch.inf)
        if self.causal:
            later = torch.ones(slots, slots, dtype=torch.bool, device=key.device).triu(1)
            within = within.masked_fill(later.repeat_interleave(groups, 0), -torch.inf)
        scores = torch.cat([before, within], dim=-1) * query.shape[-1] ** -0.5
        weights = scores.softmax(-1).to(value.dtype)
        of_context, of_block = weights.split([seen.shape[1], slots], dim=-1)
        output = (of_context.flatten(1, 2) @ worth).unflatten(1, (count, -1)) + of_block @ value  # [Hk, c, S * G, d]
        return output.unflatten(2, (slots, groups)).permute(1, 2, 0, 3, 4).flatten(2, 3)  # [c, S, Hq, d]
