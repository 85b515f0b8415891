"""Unrolled attention against a dense [S*T, S*T] mask, in fp64, forward and backward."""

import pytest
import torch

from specdraft.drafters.eagle.forward import UnrolledKeys

R, HQ, HK, D, S = 23, 4, 2, 6, 4
STARTS = torch.tensor([0] * 9 + [9] * 5 + [14] * 9)


def dense(queries, keys, values, rows):
    """Every step's queries against every step's keys under one explicit mask; ``[R, heads, d]`` per step."""
    groups = HQ // HK
    key = torch.cat(keys).repeat_interleave(groups, dim=1)  # [S*R, Hq, d]
    value = torch.cat(values).repeat_interleave(groups, dim=1)
    outputs = []
    index = torch.arange(R)
    for step, asking in enumerate(rows):
        causal = (index <= asking[:, None]) & (index >= STARTS[asking][:, None])
        own = index == asking[:, None]
        mask = torch.cat([causal] + [own] * step + [torch.zeros_like(own)] * (S - 1 - step), dim=1)
        scores = torch.einsum("nhd,khd->hnk", queries[step][asking], key) * D**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hnk,khd->nhd", weights, value))
    return outputs


@pytest.mark.parametrize("block", [1, 4, 100])
def test_equals_a_dense_mask_with_gradients(block):
    g = torch.Generator().manual_seed(0)

    def tensors(heads):
        return [torch.randn(R, heads, D, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(S)]

    queries, keys, values = tensors(HQ), tensors(HK), tensors(HK)
    leaves = [*queries, *keys, *values]
    rows = [torch.tensor([0, 2, 3, 5, 8, 9, 11, 16, 20, 22])]
    for kept in ([0, 1, 2, 4, 5, 7, 8], [0, 2, 4, 5], [1, 3]):  # documents end: fewer rows go on
        rows.append(rows[-1][kept])

    attention = UnrolledKeys(STARTS, rows[0], block)
    ours = [attention(queries[0][rows[0]], keys[0], values[0])]
    for step in range(1, S):
        attention.narrow(torch.searchsorted(rows[step - 1], rows[step]))
        ours.append(attention(queries[step][rows[step]], keys[step][rows[step]], values[step][rows[step]]))
    expected = dense(queries, keys, values, rows)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    weights = [torch.randn(o.shape, generator=g, dtype=torch.float64) for o in ours]
    mine = torch.autograd.grad(sum((o * w).sum() for o, w in zip(ours, weights, strict=True)), leaves)
    theirs = torch.autograd.grad(sum((o * w).sum() for o, w in zip(expected, weights, strict=True)), leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
