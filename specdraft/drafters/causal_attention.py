"""Causal attention of packed documents that gives its log-sum-exp, and its gradients from any output and log-sum-exp.

P = packed queries, R = positions, D = documents, Hq / Hk = query / key-value heads, d = head size. ``table [2, D + 1]``
says where the queries and the positions of each document begin and, last, end. The queries of a document are those of
its last positions; there may be none. ``window``: how many positions a query sees, its own the last; 0: all.

Softmax over more keys than those here has the gradients of flash attention's backward, if that is given the output and
the log-sum-exp over *all* keys: dS = P * (dP - rowsum(dO * O)) holds for each key alone.

Two operators, so that a compiled layer calls them as they are: what they do depends on the lengths of documents. Flash
attention where the device has it, else ``_math`` and ``_math_backward``, blocks of queries by plain products. A CPU's
flash attention knows no window."""

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specdraft.errors import warn
from specdraft.text import reason

QUERY_BLOCK = 256
_aten = torch.ops.aten


@torch.library.custom_op("specdraft::causal_attention", mutates_args=())
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, longest: int, window: int
) -> tuple[Tensor, Tensor]:
    """query: ``[P, Hq, d]``, key, value: ``[R, Hk, d]`` -> output ``[P, Hq, d]``, log-sum-exp ``[Hq, P]``. longest: a
    bound on the positions of a document."""
    if _has_flash(query, window > 0):
        return _flash(query, key, value, table, longest, window)
    return _by_document(_flash_for_cpu if query.device.type == "cpu" else _math, query, key, value, table, window)


def _by_document(
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=_accumulator(query))
    for queries, before, here in _documents(table):
        if window:
            keys = slice(before.start, here.stop)
            output[queries], lse[:, queries] = _math(query[queries], key[keys], value[keys], True, window)
            continue
        own, own_lse = forward(query[queries], key[here], value[here], True)
        if before.start < before.stop:  # keys of positions that nobody asks for: a prompt's
            other, other_lse = forward(query[queries], key[before], value[before], False)
            both = torch.logaddexp(own_lse, other_lse)
            shares = ((each - both).exp().T[..., None].to(own.dtype) for each in (own_lse, other_lse))
            own, own_lse = own * next(shares) + other * next(shares), both
        output[queries], lse[:, queries] = own, own_lse
    return output, lse


@torch.library.custom_op("specdraft::causal_attention_backward", mutates_args=())
def causal_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    table: Tensor,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of ``output``, which may be of more keys, as ``lse`` then is."""
    if _has_flash(query, window > 0):
        return _flash_backward(grad, query, key, value, output, lse, table, longest, window)
    backward = _flash_for_cpu_backward if query.device.type == "cpu" else _math_backward
    return _by_document_backward(backward, grad, query, key, value, output, lse, table, window)


def _by_document_backward(
    backward: Callable[..., tuple[Tensor, ...]],
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    table: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for queries, before, here in _documents(table):
        for keys in (slice(before.start, here.stop),) if window else (before, here):
            if keys.start < keys.stop:
                given = grad[queries], query[queries], key[keys], value[keys], output[queries], lse[:, queries]
                parts = _math_backward(*given, True, window) if window else backward(*given, keys is here)
                for whole, where, part in zip(grads, (queries, keys, keys), parts, strict=True):
                    whole[where] += part
    return grads


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, table: Tensor, longest: int, window: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=_accumulator(query))


@causal_attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    table: Tensor,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _has_flash(query: Tensor, windowed: bool) -> bool:
    """Whether CUDA's kernel takes such queries."""
    half, size = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
    if not query.is_cuda or not half or size % 8 or size > 256:
        return False
    known = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return known and _agrees(query.device, query.dtype, size, windowed)


@functools.cache
def _agrees(device: torch.device, dtype: torch.dtype, size: int, windowed: bool) -> bool:
    """Whether CUDA's kernel and its backward give what plain products give, with grouped heads, a document that is
    asked in part and one that is not asked at all. Else, with one warning, it is not used."""
    # Documents of 4, 2 and 3 positions, with 2, 0 and 3 queries.
    table = torch.tensor([[0, 2, 2, 5], [0, 4, 6, 9]], dtype=torch.int32, device=device)
    own = torch.Generator(device).manual_seed(0)
    shapes = (5, 4, size), (5, 4, size), (9, 2, size), (9, 2, size)
    query, grad, key, value = (torch.randn(shape, generator=own, device=device).to(dtype) for shape in shapes)
    window = 2 if windowed else 0
    plain = _by_document(_math, query, key, value, table, window)
    expected = *plain, *_by_document_backward(_math_backward, grad, query, key, value, *plain, table, window)
    try:
        output, lse = _flash(query, key, value, table, 4, window)
        found = output, lse, *_flash_backward(grad, query, key, value, output, lse, table, 4, window)
        worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))
        amiss = "" if worst < 0.05 else f"it differs by {worst:.2g}"
    except RuntimeError as error:
        amiss = reason(error)
    if amiss:
        what = f"heads of {size} in {dtype}{' with a sliding window' if windowed else ''}"
        warn(f"the GPU's flash attention is not used for {what}, training is slower: {amiss}")
    return not amiss


def _flash(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, longest: int, window: int
) -> tuple[Tensor, Tensor]:
    given = query, key, value, table[0], table[1], longest, longest, 0.0, True, False
    return _aten._flash_attention_forward(*given, **_seen(window))[:2]


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    table: Tensor,
    longest: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(0, dtype=torch.uint64, device=query.device)  # the random state of a dropout of 0
    bounds = table[0], table[1], longest, longest, 0.0, True, unused, unused
    return _aten._flash_attention_backward(grad, query, key, value, output, lse, *bounds, **_seen(window))


def _seen(window: int) -> dict[str, int]:
    """How CUDA's kernel is told of a window: the positions before and after a query's own."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _documents(table: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Of every document with queries: they, the positions before the first of them, and their own positions."""
    bounds = zip(*(itertools.pairwise(each) for each in table.tolist()), strict=True)
    for (first, last), (start, end) in bounds:
        if first < last:
            asked = end - (last - first)
            yield slice(first, last), slice(start, asked), slice(asked, end)


def _flash_for_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    # In 16 bits the backward of a short document takes several times as long; see docs/benchmarks.md.
    given = (each.to(_accumulator(each)).transpose(0, 1)[None] for each in (query, key, value))  # [1, heads, n, d]
    output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal)
    return output[0].transpose(0, 1).to(query.dtype), lse[0]


def _flash_for_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    given = (each.to(_accumulator(each)).transpose(0, 1)[None] for each in (grad, query, key, value, output))
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, lse[None], 0.0, causal)
    return tuple(each[0].transpose(0, 1).to(query.dtype) for each in grads)


def _scores(query: Tensor, key: Tensor, causal: bool, window: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Of every block of queries: where it lies, the keys it reads, itself and its scores ``[Hk, b * G, w]``. Causal
    queries are those of the last positions."""
    groups, before = query.shape[1] // key.shape[1], len(key) - len(query)
    for first in range(0, len(query), QUERY_BLOCK):
        block = slice(first, min(first + QUERY_BLOCK, len(query)))
        begin = max(0, before + first + 1 - window) if window else 0
        keys = slice(begin, before + block.stop if causal else len(key))
        asked = _by_head(query[block], key.shape[1])
        scores = (asked @ key[keys].permute(1, 2, 0)).to(_accumulator(query)) * query.shape[-1] ** -0.5
        if causal:
            column = torch.arange(begin, keys.stop, device=key.device)
            row = torch.arange(before + first, before + block.stop, device=key.device)
            row = row.repeat_interleave(groups)[:, None]  # [b * G, 1]
            hidden = (column > row) | (column <= row - window) if window else column > row
            scores.masked_fill_(hidden, -torch.inf)
        yield block, keys, asked, scores


def _by_head(queries: Tensor, kv_heads: int) -> Tensor:
    """``[b, Hq, ...]`` -> ``[Hk, b * G, ...]``."""
    return queries.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)


def _by_query(heads: Tensor, like: Tensor) -> Tensor:
    """``[Hk, b * G, ...]`` -> ``[b, Hq, ...]``."""
    return heads.unflatten(1, (len(like), -1)).transpose(0, 1).flatten(1, 2)


def _math(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int = 0) -> tuple[Tensor, Tensor]:
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=_accumulator(query))
    for block, keys, _, scores in _scores(query, key, causal, window):
        total = scores.logsumexp(-1)  # [Hk, b * G]
        weights = (scores - total[..., None]).exp_().to(value.dtype)
        output[block] = _by_query(weights @ value[keys].transpose(0, 1), query[block])
        lse[:, block] = _by_query(total, query[block]).T
    return output, lse


def _math_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, causal: bool, window: int = 0
) -> tuple[Tensor, ...]:
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    delta = (grad * output).sum(-1, dtype=lse.dtype)  # [n, Hq]
    for block, keys, asked, scores in _scores(query, key, causal, window):
        g, total, sums = (_by_head(each[block], key.shape[1]) for each in (grad, lse.T, delta))
        weights = (scores - total[..., None]).exp_()  # [Hk, b * G, w]
        grad_value[keys] += (weights.to(g.dtype).transpose(1, 2) @ g).transpose(0, 1)
        grad_scores = weights * (g @ value[keys].permute(1, 2, 0) - sums[..., None]) * query.shape[-1] ** -0.5
        grad_scores = grad_scores.to(g.dtype)
        grad_query[block] = _by_query(grad_scores @ key[keys].transpose(0, 1), query[block])
        grad_key[keys] += (grad_scores.transpose(1, 2) @ asked).transpose(0, 1)
    return grad_query, grad_key, grad_value
