"""The head's attention: one set of projections, two sources of keys (training and decoding).

R = rows of the flat batch, n = rows that ask, Hq / Hk = query / key-value heads, G = Hq // Hk, d = head size.

In the training-time test a query attends causally to the keys of step 0 and to *its own row's* key of every later step
(EAGLE-3, 2503.01840, figure 6). So n queries need n x R scores and s single ones each, never an [S*T, S*T] mask; and
the scores exist for one block of queries at a time, made again in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

QUERY_BLOCK = 256


class UnrolledKeys:
    """Keys and values of a training-time test, filled step by step by calling it as the attention."""

    def __init__(self, starts: Tensor, rows: Tensor, block: int = QUERY_BLOCK) -> None:
        """starts: ``[R]`` first row of each row's document. rows: ``[n]`` ascending rows that ask at step 0."""
        self.starts, self.rows, self.block = starts, rows, block
        self.first: tuple[Tensor, Tensor] | None = None  # keys, values [R, Hk, d] of step 0
        self.later: list[tuple[Tensor, Tensor]] = []  # keys, values [n, Hk, d] of each later step

    def narrow(self, kept: Tensor) -> None:
        """Go on with the asking rows ``kept [m]`` (indices into the present ones)."""
        self.rows = self.rows[kept]
        self.later = [(key[kept], value[kept]) for key, value in self.later]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend ``[n, Hq, d] -> [n, Hq, d]``; key and value ``[R, Hk, d]`` at step 0, ``[n, Hk, d]`` later."""
        if self.first is None:
            self.first = (key, value)
        else:
            self.later.append((key, value))
        first_key, first_value = self.first
        outputs = []
        for start in range(0, len(self.rows), self.block):
            part = slice(start, start + self.block)
            rows = self.rows[part]
            low, high = int(self.starts[rows[0]]), int(rows[-1]) + 1  # rows ascend, and so do their documents
            own = [(k[part], v[part]) for k, v in self.later]
            keys = torch.stack([k for k, _ in own], dim=2) if own else None  # [b, Hk, s, d]
            values = torch.stack([v for _, v in own], dim=2) if own else None
            column = torch.arange(low, high, device=rows.device)
            hidden = (column > rows[:, None]) | (column < self.starts[rows][:, None])  # [b, w]
            outputs.append(
                checkpoint(
                    attend_block,
                    query[part],
                    first_key[low:high],
                    first_value[low:high],
                    keys,
                    values,
                    hidden,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        return torch.cat(outputs)


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor | None, own_values: Tensor | None, hidden: Tensor
) -> Tensor:
    """Softmax attention of b queries ``[b, Hq, d]`` over w shared keys ``[w, Hk, d]`` and s keys of their own each.

    own_keys, own_values: ``[b, Hk, s, d]`` or None. hidden: bool ``[b, w]``, True where a shared key must not be seen.
    """
    b, num_heads, size = query.shape
    kv_heads = key.shape[1]
    groups = num_heads // kv_heads
    q = query.view(b, kv_heads, groups, size) * size**-0.5
    by_head = q.permute(1, 0, 2, 3).reshape(kv_heads, b * groups, size)  # [Hk, b*G, d]
    scores = by_head @ key.permute(1, 2, 0)  # [Hk, b*G, w]
    scores = scores.view(kv_heads, b, groups, -1).masked_fill(hidden[None, :, None], -torch.inf)
    width = scores.shape[-1]
    if own_keys is not None:
        own = (q @ own_keys.transpose(-1, -2)).permute(1, 0, 2, 3)  # [Hk, b, G, s]
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.float().softmax(-1).to(value.dtype) if scores.dtype != torch.float64 else scores.softmax(-1)
    shared = weights[..., :width].reshape(kv_heads, b * groups, width) @ value.transpose(0, 1)
    output = shared.view(kv_heads, b, groups, size).transpose(0, 1)  # [b, Hk, G, d]
    if own_values is not None:
        output = output + weights[..., width:].transpose(0, 1) @ own_values
    return output.reshape(b, num_heads, size)


@dataclass
class CachedKeys:
    """Keys and values of one request while decoding, called as the attention by the last rows of what is appended.

    ``length`` rows are valid; setting it back forgets what was drafted after them.
    """

    capacity: int
    length: int = 0
    _buffers: list[Tensor] = field(default_factory=list)  # keys, values [Hk, capacity, d]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        """Append key and value ``[n, Hk, d]``; attend with the queries ``[m, Hq, d]`` of the last m rows.

        seen: bool ``[m, D]``, which of the last D rows each query may attend to (a draft tree); all before are seen.
        None for a single query, which sees everything.
        """
        assert seen is not None or len(query) == 1
        end = self.length + len(key)
        if not self._buffers or end > self.capacity:
            self.capacity = max(end, self.capacity if not self._buffers else 2 * self.capacity)
            old, shape = self._buffers, (key.shape[1], self.capacity, key.shape[2])
            self._buffers = [key.new_empty(shape), key.new_empty(shape)]
            for new, previous in zip(self._buffers, old, strict=False):
                new[:, : self.length] = previous[:, : self.length]
        for buffer, added in zip(self._buffers, (key, value), strict=True):
            buffer[:, self.length : end] = added.transpose(0, 1)
        self.length = end
        keys, values = (buffer[None, :, :end] for buffer in self._buffers)
        mask = None if seen is None else torch.nn.functional.pad(seen, (end - seen.shape[1], 0), value=True)
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


@dataclass
class KeysSideBySide:
    """The keys of several requests, called as the attention by the rows of all, request after request.

    added: how many rows each request has in the pass. asking: how many of them ask, the last ones. seen: as
    ``CachedKeys`` takes it, of each request.
    """

    requests: Sequence[CachedKeys]
    added: list[int]
    asking: list[int]
    seen: Sequence[Tensor | None]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with the queries ``[sum of asking, Hq, d]``; key and value ``[sum of added, Hk, d]``."""
        parts = zip(
            self.requests,
            query.split(self.asking),
            key.split(self.added),
            value.split(self.added),
            self.seen,
            strict=True,
        )
        return torch.cat([keys(*rows) for keys, *rows in parts])
