"""Unrolled attention against a dense [S*T, S*T] mask, in fp64, forward and backward; and what it moves."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdraft.drafters import unrolled_keys as module
from specdraft.drafters.alignment import align
from specdraft.drafters.unrolled_keys import UnrolledKeys
from specdraft.targets.batch import Batch

R, HQ, HK, D, S = 23, 4, 2, 6, 4
LENGTHS = [9, 5, 9]


def batch_of(lengths, learned):
    """A sequence of documents; ``learned [R]`` are the tokens to learn."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Batch(*(each[None] for each in (torch.arange(sum(lengths)), positions, documents, learned)))


def dense(queries, keys, values, rows, window):
    """Every step's queries against every step's keys under one explicit mask; ``[R, heads, d]`` per step."""
    groups = HQ // HK
    key = torch.cat(keys).repeat_interleave(groups, dim=1)  # [S*R, Hq, d]
    value = torch.cat(values).repeat_interleave(groups, dim=1)
    outputs = []
    index = torch.arange(R)
    starts = torch.tensor([0] * 9 + [9] * 5 + [14] * 9)
    for step, asking in enumerate(rows):
        causal = (index <= asking[:, None]) & (index >= starts[asking][:, None])
        causal &= index > asking[:, None] + step - window
        own = index == asking[:, None]
        mask = torch.cat([causal] + [own] * step + [torch.zeros_like(own)] * (S - 1 - step), dim=1)
        scores = torch.einsum("nhd,khd->hnk", queries[step][asking], key) * D**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hnk,khd->nhd", weights, value))
    return outputs


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("from_the_start", [True, False])
def test_equals_a_dense_mask_with_gradients(from_the_start, window):
    g = torch.Generator().manual_seed(0)

    def tensors(heads):
        return [torch.randn(R, heads, D, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(S)]

    queries, keys, values = tensors(HQ), tensors(HK), tensors(HK)
    leaves = [*queries, *keys, *values]
    learned = torch.ones(R, dtype=torch.bool)
    if not from_the_start:  # a prompt, a second turn, and a document of which nothing is learned
        learned[[0, 1, 2, 3, *range(9, 14), 16, 17, 18]] = False
    aligned = align(batch_of(LENGTHS, learned), S)
    rows = [aligned.supervised[0]]
    for kept in ([0, 1, -2, -1], [0, 2], [1]):
        rows.append(rows[-1][kept])

    attention = UnrolledKeys(aligned.documents, rows[0], window)
    ours = [attention(queries[0][rows[0]], keys[0], values[0])]
    for step in range(1, S):
        attention.narrow(torch.searchsorted(rows[step - 1], rows[step]))
        ours.append(attention(queries[step][rows[step]], keys[step][rows[step]], values[step][rows[step]]))
    expected = dense(queries, keys, values, rows, window or R)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    weights = [torch.randn(o.shape, generator=g, dtype=torch.float64) for o in ours]
    mine = torch.autograd.grad(sum((o * w).sum() for o, w in zip(ours, weights, strict=True)), leaves)
    theirs = torch.autograd.grad(sum((o * w).sum() for o, w in zip(expected, weights, strict=True)), leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_of_a_window_that_hides_nothing_there_is_none():
    aligned = align(batch_of(LENGTHS, torch.ones(R, dtype=torch.bool)), 2)
    windows = []
    for sliding_window in (None, 10, 9, 5):
        attention = UnrolledKeys(aligned.documents, aligned.supervised[0], sliding_window)
        windows.append([attention.window])
        attention.narrow(torch.searchsorted(*aligned.supervised))
        windows[-1].append(attention.window)
    assert windows == [[0, 0], [0, 0], [0, 8], [5, 4]]


def test_under_autocast_all_is_of_the_values_dtype():
    aligned = align(batch_of(LENGTHS, torch.ones(R, dtype=torch.bool)), 1)
    asked = aligned.supervised[0]
    query, key, value = (torch.randn(n, heads, 8) for n, heads in ((len(asked), HQ), (R, HK), (R, HK)))
    answer = UnrolledKeys(aligned.documents, asked)(query, key, value.bfloat16())
    assert answer.dtype == torch.bfloat16
    full = UnrolledKeys(aligned.documents, asked)(query, key, value)
    torch.testing.assert_close(answer.float(), full, rtol=0.03, atol=0.03)


class Bytes(TorchDispatchMode):
    """``count``: what all operators read and write."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            touched = tree_leaves((args, kwargs, out))
            self.count += sum(each.numel() * each.element_size() for each in touched if isinstance(each, torch.Tensor))
        return out


def bytes_of(lengths):
    rows = sum(lengths)
    aligned = align(batch_of(lengths, torch.ones(rows, dtype=torch.bool)), 2)
    asked, kept = aligned.supervised
    queries = [torch.randn(len(each), HQ, 8, requires_grad=True) for each in (asked, kept)]
    keys = [torch.randn(n, HK, 8, requires_grad=True) for n in (rows, rows, len(kept), len(kept))]
    with Bytes() as counted:
        attention = UnrolledKeys(aligned.documents, asked)
        outputs = [attention(queries[0], *keys[:2])]
        attention.narrow(torch.searchsorted(asked, kept))
        outputs.append(attention(queries[1], *keys[2:]))
        torch.autograd.grad(sum(each.sum() for each in outputs), [*queries, *keys])
    return counted.count


def test_what_a_step_moves_grows_with_the_positions_whatever_their_documents(monkeypatch):
    for name in ("causal_attention", "causal_attention_backward"):  # what is inside an operator is not dispatched
        monkeypatch.setattr(module, name, getattr(module, name)._init_fn)
    one, twice, eight = bytes_of([300]), bytes_of([600]), bytes_of([2400])
    assert twice == pytest.approx(2 * one, rel=0.02) and eight == pytest.approx(8 * one, rel=0.03)
    assert bytes_of([100] * 24) == pytest.approx(eight, rel=0.1)
    assert eight / 2400 < 100 * 8 * (HQ + 2 * HK) * 4  # a few passes over queries, keys and values
