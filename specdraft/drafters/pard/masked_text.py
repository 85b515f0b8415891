"""What PARD reads in training: a packed batch, and behind it the masks of the drafts that begin in it.

R = positions of the flat batch, M = masks, N = R + M, n = masks of a depth, Hq / Hk = query / key-value heads, d = head
size.

A mask of depth s sees the text up to its anchor, the last token that was emitted, and of the masks those of the same
anchor up to its own. That is what a query of a training-time test sees, so that ``unrolled_keys.py`` has the attention,
and no mask ``[N, N]`` is made; ``visible`` is that mask, which it is compared with, and which architectures are given
that ask for more than plain attention."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdraft.drafters.alignment import Alignment
from specdraft.drafters.unrolled_keys import UnrolledKeys


class MaskedText:
    """ids, positions: ``[1, N]``, the text's and then the masks', by depth. parts: R, and how many masks each depth
    has, which are as many as ``alignment`` has positions for at that step; depths without any are left out."""

    def __init__(self, alignment: Alignment, mask_token: int) -> None:
        """``alignment``: of a step for every depth, the text's own first. The anchor of its position r is token r+1."""
        self.anchors = [at + 1 for at in alignment.supervised[1:] if len(at)]  # [n] each, all among those before
        here, size = alignment.positions, len(alignment.positions)
        self.parts = [size, *map(len, self.anchors)]
        text = alignment.tokens[:size]
        self.ids = torch.cat([text, text.new_full((sum(self.parts[1:]),), mask_token)])[None]
        there = [here[at] + depth for depth, at in enumerate(self.anchors, start=1)]
        self.positions = torch.cat([here, *there])[None]
        self.documents = alignment.documents.whole(size)
        self.text = torch.arange(size, device=here.device)
        above = [self.text, *self.anchors]
        self.kept = [torch.searchsorted(*pair) for pair in zip(above, self.anchors, strict=False)]  # [n] each

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
        """query: ``[1, Hq, N, d]``; key: ``[1, Hk, N, d]``; value: ``[1, Hk, N, e]``, e at most d -> ``[1, N, Hq, e]``.
        scaling: of scores; None: one over the root of d."""
        size, width = query.shape[-1], value.shape[-1]
        if scaling is not None:
            query = query * (scaling * size**0.5)
        value = pad(value, (0, size - width))
        parts = (each[0].transpose(0, 1).contiguous().split(self.parts) for each in (query, key, value))
        keys, outputs = UnrolledKeys(self.documents, self.text), []
        for depth, given in enumerate(zip(*parts, strict=True)):  # [n, heads, d] each
            if depth > 0:
                keys.narrow(self.kept[depth - 1])
            outputs.append(keys(*given))
        return torch.cat(outputs)[None, ..., :width]

    def visible(self) -> Tensor:
        """Bool ``[1, N, N]``: which keys every query sees."""
        anchor = torch.cat([self.text, *self.anchors])  # [N]
        depth = torch.repeat_interleave(torch.tensor(self.parts, device=anchor.device))  # [N], 0 for the text
        document = torch.bucketize(anchor, self.documents.table[1, 1:], right=True)
        before = (depth == 0) & (anchor <= anchor[:, None]) & (document == document[:, None])
        own = (depth > 0) & (anchor == anchor[:, None]) & (depth <= depth[:, None])
        return (before | own)[None]
