"""By torch's operations: blocks, forbidden tokens, logits that are kept, sums in full precision."""

import math

import pytest
import torch

from specdraft.losses import eager as module
from specdraft.losses.divergence import DIVERGENCES, divergence, forward_kl
from specdraft.losses.eager import CACHED, Eager, softmax

C, V, VD = 10, 30, 12
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def problem(pruned):
    """Draft logits, target logits, draft ids, labels as draft ids."""
    z, logits = (torch.randn(C, size, dtype=torch.float64) for size in (VD if pruned else V, V))
    ids = torch.randperm(V)[:VD].sort().values if pruned else None
    return z, logits, ids, torch.randint(-1, z.shape[1], (C,))


def eager(z, name="forward_kl"):
    return Eager(divergence(name), C, z.shape[1], torch.float64, CPU)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("pruned", [False, True])
def test_blocks_are_parts_of_the_whole(monkeypatch, name, pruned):
    z, logits, ids, label = problem(pruned)
    index = torch.tensor([0, 3, 4, 7, 8, 9])
    results = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for rows in (C, 4, 1):
        monkeypatch.setattr(module, "CACHED", rows * z.shape[1])
        compare = eager(z, name)
        assert compare.rows == rows
        target = compare.target(logits.clone(), ids, label)
        whole, part = compare.draft(z.clone(), target, None, keep=False), compare.draft(z[index], target, index, False)
        results.append((*target, *whole, *part))
        assert torch.equal(whole.grad[index], part.grad)
    for blocks in results[1:]:
        for mine, theirs in zip(blocks, results[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14)


def test_blocks_fit_into_the_caches_of_all_threads(monkeypatch):
    def rows(size, vocabulary, device=CPU):
        return Eager(forward_kl, size, vocabulary, torch.float32, device).rows

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert rows(256, 32_768) == 16 and rows(64, CACHED + 1) == 1 and rows(64, CACHED // 2) == 2
    assert rows(64, 1000) == 64, "no more than a chunk has"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert rows(256, 32_768) == 32 and rows(64, CACHED + 1) == 1
    assert rows(64, 1000, torch.device("meta")) == 64, "elsewhere than on a processor a chunk is one block"


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_takes_the_place_of_logits_that_nobody_keeps(name, dtype):
    z, logits, ids, label = problem(pruned=True)
    z = z.to(dtype)
    compare = eager(z, name)
    target = compare.target(logits, ids, label)
    before = z.clone()
    kept = compare.draft(z, target, None, keep=True)
    assert torch.equal(z, before) and kept.grad is not z
    there = compare.draft(z, target, None, keep=False)
    assert there.grad is z and z.dtype == dtype
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, there, strict=True))


@pytest.mark.parametrize("pruned", [False, True])
def test_narrow_logits_of_the_target_are_read_in_full_precision(pruned):
    z, logits, ids, label = problem(pruned)
    narrow, exact = eager(z).target(logits.bfloat16(), ids, label), eager(z).target(logits.clone(), ids, label)
    assert narrow.p.dtype == narrow.mass.dtype == torch.float64
    rounded = eager(z).target(logits.bfloat16().double(), ids, label)
    assert torch.equal(narrow.p, rounded.p) and not torch.equal(narrow.p, exact.p)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("pruned", [False, True])
def test_tokens_that_both_forbid_are_as_good_as_absent(name, pruned):
    z, logits, ids, label = problem(pruned)
    forbidden = torch.zeros(V, dtype=torch.bool)
    forbidden[ids[3:7] if pruned else slice(3, 7)] = True
    own = forbidden if ids is None else forbidden[ids]
    label = torch.where((label >= 3) & (label < 7), -1, label)
    with_them = eager(z, name)
    target = with_them.target(logits.masked_fill(forbidden, -torch.inf), ids, label)
    got = with_them.draft(z.masked_fill(own, -torch.inf), target, None, keep=True)

    z, ids = z[:, ~own], None if ids is None else torch.cumsum(~forbidden, 0)[ids[~own]] - 1
    without = eager(z, name)
    less = without.target(logits[:, ~forbidden], ids, torch.where(label >= 7, label - 4, label))
    expected = without.draft(z, less, None, keep=True)
    torch.testing.assert_close((target.mass, target.p_log_p), (less.mass, less.p_log_p), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close((got.values, got.alpha), (expected.values, expected.alpha), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.grad[:, ~own], expected.grad, rtol=1e-11, atol=1e-13)
    assert (got.grad[:, own] == 0).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_autocast_leaves_sums_alone(name):
    z, logits, ids, label = (each.float() if each.is_floating_point() else each for each in problem(pruned=True))
    compare, found = Eager(divergence(name), C, VD, torch.float32, CPU), []
    for active in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=active):
            target = compare.target(logits.clone(), ids, label)
            found.append((*target, *compare.draft(z.clone(), target, None, keep=False)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_softmax_is_torchs():
    z = 30 * torch.randn(C, V, dtype=torch.float64)
    out = torch.empty_like(z)
    probabilities, log_normalizer, best = softmax(z, out)
    assert probabilities is out and torch.equal(best, z.argmax(-1))
    torch.testing.assert_close(out, z.softmax(-1), rtol=1e-13, atol=0)
    torch.testing.assert_close(log_normalizer, z.logsumexp(-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("size", [1, 100, 128, 129, 300, 512])
def test_the_largest_logit_is_found_where_it_first_stands(size):
    rows = torch.randint(-3, 3, (40, size)).double()
    rows[0], rows[1, -1], rows[2, 0], rows[3] = 1.0, 9.0, 9.0, -math.inf
    values, index = module._max(rows)
    assert torch.equal(values, rows.amax(-1))
    assert torch.equal(index, torch.stack([(row == row.max()).nonzero()[0, 0] for row in rows]))
    assert [len(each) for each in module._max(rows[:0])] == [0, 0]


def test_softmax_of_logits_that_are_far_apart():
    z = torch.tensor([[0.0, -1e4, 80.0], [-3e38, 0.0, -3e38]])
    q, log_normalizer, index = softmax(z, torch.empty_like(z))
    torch.testing.assert_close(q, z.double().softmax(-1).float())
    torch.testing.assert_close(log_normalizer, z.double().logsumexp(-1).float())
    assert index.tolist() == [2, 1]
