"""The keys of a training-time test: softmax attention over those of step 0, causally, and a position's own of later
steps.

R = positions of the flat batch, n = queries, P = packed queries, s = steps before, Hq / Hk = query / key-value heads, G
= Hq // Hk, d = head size.

A query attends to the keys of step 0 up to its position and to *its own position's* key of every later step (EAGLE-3,
figure 6). The first part is causal attention of packed documents, the second a few products; they are merged by their
log-sum-exp, and scores of ``[S*T, S*T]`` are never made.

In a sliding window a query of step s, which stands s positions after the last key of step 0 that it sees, sees s fewer
of them."""

from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.alignment import Documents
from specdraft.drafters.causal_attention import causal_attention, causal_attention_backward


class UnrolledKeys:
    """Keys and values of a layer in a training-time test, filled step by step by calling it as the attention."""

    def __init__(self, documents: Documents, queries: Tensor, sliding_window: int | None = None) -> None:
        """queries: ``[n]`` ascending positions of step 0, for which ``documents`` were made. sliding_window: positions
        that a query sees, its own the last; more than there are steps."""
        self.table, self.longest, self.packed = documents
        starts, ends = self.table
        document = torch.bucketize(queries, ends[1:], right=True)  # [n]
        self.slots = queries + (starts - ends)[document + 1]  # [n] among the packed: both end together
        self.shared: tuple[Tensor, Tensor] | None = None  # keys, values [R, Hk, d] of step 0
        self.own: tuple[Tensor, Tensor] | None = None  # of every later step, [n, Hk, s, d]
        self._see(sliding_window)

    def narrow(self, kept: Tensor) -> None:
        """Go on with the next step, for some of the queries: ``kept [m]`` (indices into the present ones)."""
        self.slots = self.slots[kept]
        if self.own is not None:
            self.own = self.own[0][kept], self.own[1][kept]
        self._see(self.seen and self.seen - 1)

    def _see(self, seen: int | None) -> None:
        """seen: how many keys of step 0 a query sees; None: all."""
        self.seen = seen
        self.window = 0 if seen is None or seen >= self.longest else seen  # flash attention is faster without one

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend ``[n, Hq, d] -> [n, Hq, d]``; key and value ``[R, Hk, d]`` at step 0, ``[n, Hk, d]`` later."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves the rotated ones in fp32
        if self.shared is None:
            self.shared = key, value
            none = len(query), key.shape[1], 0, key.shape[2]
            self.own = key.new_empty(none), value.new_empty(none)
        else:
            assert self.own is not None
            pairs = zip(self.own, (key, value), strict=True)
            own_key, own_value = (torch.cat([held, new[:, :, None]], dim=2) for held, new in pairs)
            self.own = own_key, own_value
        bounds = self.table, self.longest, self.packed, self.window
        return _Merged.apply(query, *self.shared, *self.own, self.slots, *bounds)


class _Merged(torch.autograd.Function):
    """Attention to the shared and to the own keys at once."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        slots: Tensor,
        table: Tensor,
        longest: int,
        packed: int,
        window: int,
    ) -> Tensor:
        shared, lse = causal_attention(_spread(query, slots, packed), key, value, table, longest, window)
        shared, lse = shared[slots], lse.T[slots]  # [n, Hq, d], [n, Hq]
        scores = _own_scores(query, own_key, lse.dtype)  # [n, Hq, s]
        total = torch.logaddexp(lse, scores.logsumexp(-1))  # [n, Hq]
        weights = (scores - total[..., None]).exp().to(query.dtype)
        output = shared * (lse - total).exp()[..., None].to(query.dtype)
        output = output + (_grouped(weights, own_key) @ own_value).flatten(1, 2)
        ctx.save_for_backward(query, key, value, own_key, own_value, slots, table, output, total)
        ctx.longest, ctx.packed, ctx.window = longest, packed, window
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, slots, table, output, total = ctx.saved_tensors
        spread = (_spread(each, slots, ctx.packed) for each in (grad, query, output, total))
        packed_grad, packed_query, packed_output, packed_total = spread
        given = packed_grad, packed_query, key, value, packed_output, packed_total.T.contiguous(), table
        grad_query, grad_key, grad_value = causal_attention_backward(*given, ctx.longest, ctx.window)

        weights = (_own_scores(query, own_key, total.dtype) - total[..., None]).exp()  # [n, Hq, s]
        delta = (grad * output).sum(-1, dtype=total.dtype)  # [n, Hq]
        by_head = _grouped(grad, own_key)  # [n, Hk, G, d]
        grad_weights = (by_head @ own_value.transpose(-1, -2)).flatten(1, 2)  # [n, Hq, s]
        grad_scores = weights * (grad_weights - delta[..., None]) * query.shape[-1] ** -0.5
        grad_scores = _grouped(grad_scores.to(query.dtype), own_key)  # [n, Hk, G, s]
        grad_query = grad_query[slots] + (grad_scores @ own_key).flatten(1, 2)
        grad_own_key = grad_scores.transpose(-1, -2) @ _grouped(query, own_key)  # [n, Hk, s, d]
        grad_own_value = _grouped(weights.to(query.dtype), own_key).transpose(-1, -2) @ by_head
        return grad_query, grad_key, grad_value, grad_own_key, grad_own_value, None, None, None, None, None


def _spread(rows: Tensor, slots: Tensor, packed: int) -> Tensor:
    """Rows ``[n, ...]`` at their slots among P, with zeros between: a query of zeros gives no key a gradient."""
    return rows.new_zeros(packed, *rows.shape[1:]).index_copy_(0, slots, rows)


def _grouped(heads: Tensor, own: Tensor) -> Tensor:
    """``[n, Hq, ...]`` -> ``[n, Hk, G, ...]``, as many key-value heads as ``own [n, Hk, s, d]`` has."""
    return heads.unflatten(1, (own.shape[1], -1))


def _own_scores(query: Tensor, own_key: Tensor, dtype: torch.dtype) -> Tensor:
    scores = (_grouped(query, own_key) @ own_key.transpose(-1, -2)).flatten(1, 2).to(dtype)
    return scores * query.shape[-1] ** -0.5  # [n, Hq, s]
