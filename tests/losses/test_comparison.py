"""What a chunk is compared with and by: blocks, forbidden tokens, logits that are kept, and the way by device."""

import builtins
import importlib.util
import math
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from specdraft.losses import comparison
from specdraft.losses.comparison import CACHED, Eager, softmax
from specdraft.losses.divergence import DIVERGENCES, divergence, forward_kl

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
        monkeypatch.setattr(comparison, "CACHED", rows * z.shape[1])
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


def test_softmax_is_torchs():
    z = 30 * torch.randn(C, V, dtype=torch.float64)
    out = torch.empty_like(z)
    probabilities, log_normalizer, best = softmax(z, out)
    assert probabilities is out and torch.equal(best, z.argmax(-1))
    torch.testing.assert_close(out, z.softmax(-1), rtol=1e-13, atol=0)
    torch.testing.assert_close(log_normalizer, z.logsumexp(-1), rtol=1e-13, atol=0)


def test_a_gpu_with_triton_takes_the_kernel(monkeypatch):
    made = SimpleNamespace(Fused=lambda divergence: ("kernel", divergence), kind=lambda given: given is forward_kl)
    monkeypatch.setitem(sys.modules, "specdraft.losses.fused", made)
    monkeypatch.setattr(comparison, "Eager", lambda *given: "eager")
    found = dict.fromkeys(["triton"], object())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name))

    monkeypatch.setattr(comparison, "agrees", lambda *_: True)

    def taken(divergence=forward_kl, dtype=torch.float32, device=CUDA):
        return comparison.comparison(divergence, 4, VD, dtype, device)

    assert taken() == ("kernel", forward_kl)
    assert taken(divergence("jsd")) == taken(dtype=torch.float64) == taken(device=CPU) == "eager"
    found.clear()
    assert taken() == "eager"


def test_a_processor_does_not_look_for_triton(monkeypatch):
    imported, real = [], builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: imported.append(name) or real(name, *rest))
    compare = comparison.comparison(forward_kl, 4, VD, torch.float32, CPU)
    assert isinstance(compare, Eager) and not any("triton" in name or "fused" in name for name in imported)


class Wrong(Eager):
    """A kernel with one fault."""

    def draft(self, z, target, index, keep):
        found = super().draft(z, target, index, keep)
        return found._replace(alpha=found.alpha + 0.01)


class Broken(Eager):
    """A kernel that does not compile."""

    def target(self, logits, draft_ids, label):
        raise AssertionError("no backend")


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(("kernel", "amiss"), [(Eager, ""), (Wrong, "it differs by 0.01"), (Broken, "no backend")])
def test_a_kernel_that_says_something_else_is_not_used(monkeypatch, name, kernel, amiss):
    monkeypatch.setattr(comparison, "_agreeing", {})
    asked = divergence(name)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            assert comparison.agrees(kernel(asked, 7, 150, torch.float32, CPU), asked, CPU) == (not amiss)
    assert [amiss in str(each.message) for each in warned] == [True] * bool(amiss)


@pytest.mark.parametrize("size", [1, 100, 128, 129, 300, 512])
def test_the_largest_logit_is_found_where_it_first_stands(size):
    rows = torch.randint(-3, 3, (40, size)).double()
    rows[0], rows[1, -1], rows[2, 0], rows[3] = 1.0, 9.0, 9.0, -math.inf
    values, index = comparison._max(rows)
    assert torch.equal(values, rows.amax(-1))
    assert torch.equal(index, torch.stack([(row == row.max()).nonzero()[0, 0] for row in rows]))
    assert [len(each) for each in comparison._max(rows[:0])] == [0, 0]


def test_softmax_of_logits_that_are_far_apart():
    z = torch.tensor([[0.0, -1e4, 80.0], [-3e38, 0.0, -3e38]])
    q, log_normalizer, index = softmax(z, torch.empty_like(z))
    torch.testing.assert_close(q, z.double().softmax(-1).float())
    torch.testing.assert_close(log_normalizer, z.double().logsumexp(-1).float())
    assert index.tolist() == [2, 1]
