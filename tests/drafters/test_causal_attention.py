"""Causal attention of packed documents beside a dense mask, by flash attention and by plain products."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from specdraft.drafters import causal_attention as module
from specdraft.drafters.causal_attention import causal_attention, causal_attention_backward

HQ, HK, D = 4, 2, 8
# Documents of 9, 5, 3 and 6 positions: the last 4 and all 5 ask, then none, then the last.
TABLE = torch.tensor([[0, 4, 9, 9, 10], [0, 9, 14, 17, 23]], dtype=torch.int32)
QUERIES = torch.tensor([5, 6, 7, 8, 9, 10, 11, 12, 13, 22])
STARTS = torch.tensor([0] * 4 + [9] * 5 + [17])


@pytest.fixture(params=[0, 3], ids=["all", "window"])
def window(request):
    return request.param


# The processor's flash attention knows no window.
@pytest.fixture(params=["flash", "math", "math, small blocks", "math, window", "math, small blocks, window"])
def windowed(request, monkeypatch):
    """The window, attended to in one of the ways."""
    if request.param == "flash":
        for name in ("_math", "_math_backward"):
            monkeypatch.setattr(module, name, lambda *_: pytest.fail("not by flash attention"))
    else:
        monkeypatch.setattr(module, "_flash_for_cpu", module._math)
        monkeypatch.setattr(module, "_flash_for_cpu_backward", module._math_backward)
    if "small blocks" in request.param:
        monkeypatch.setattr(module, "QUERY_BLOCK", 2)
    return 3 if "window" in request.param else 0


def tensors(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = (10, HQ, D), (23, HK, D), (23, HK, D)
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def dense(query, key, value, window=0):
    """Output ``[P, Hq, d]`` and log-sum-exp ``[Hq, P]`` under an explicit mask."""
    key, value = (each.repeat_interleave(HQ // HK, dim=1) for each in (key, value))
    index = torch.arange(23)
    seen = (index <= QUERIES[:, None]) & (index >= STARTS[:, None])
    if window:
        seen &= index > QUERIES[:, None] - window
    scores = (torch.einsum("nhd,khd->hnk", query, key) * D**-0.5).masked_fill(~seen, -torch.inf)
    return torch.einsum("hnk,khd->nhd", scores.softmax(-1), value), scores.logsumexp(-1)


def test_output_and_log_sum_exp_are_those_of_a_dense_mask(windowed):
    query, key, value = tensors()
    with torch.no_grad():
        found = causal_attention(query, key, value, TABLE, 9, windowed)
        expected = dense(query, key, value, windowed)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_a_dense_mask(windowed):
    leaves = tensors()
    output, lse = dense(*leaves, windowed)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(output, leaves, grad)
    with torch.no_grad():
        found = causal_attention_backward(grad, *leaves, output, lse, TABLE, 9, windowed)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_in_bf16_sums_are_kept_in_fp32(windowed):
    query, key, value = tensors(torch.bfloat16)
    with torch.no_grad():
        output, lse = causal_attention(query, key, value, TABLE, 9, windowed)
        expected, expected_lse = dense(*(each.double() for each in (query, key, value)), windowed)
        grads = causal_attention_backward(torch.ones_like(output), query, key, value, output, lse, TABLE, 9, windowed)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0.01, atol=0.01)
    output = dense(query.double(), key.double(), value.double(), windowed)[0]
    wanted = torch.autograd.grad(output.sum(), (query, key, value))
    for mine, theirs in zip(grads, wanted, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


def test_the_operators_can_be_compiled(window):
    query, key, value = tensors()
    torch.library.opcheck(causal_attention, (query.detach(), key.detach(), value.detach(), TABLE, 9, window))
    output, lse = dense(query, key, value, window)
    given = [each.detach() for each in (torch.ones_like(output), query, key, value, output, lse)]
    torch.library.opcheck(causal_attention_backward, (*given, TABLE, 9, window))


def test_gpus_of_today_have_a_kernel_for_half_precision(monkeypatch):
    monkeypatch.setattr(module, "_agrees", lambda *_: True)

    def has(dtype=torch.bfloat16, size=128, capability=(8, 0), is_cuda=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        query = SimpleNamespace(dtype=dtype, shape=(300, 5, size), is_cuda=is_cuda, device="cuda")
        return module._has_flash(query, windowed=False)

    assert has() and has(torch.float16) and has(size=8) and has(size=72) and has(size=256) and has(capability=(9, 0))
    assert not has(torch.float32) and not has(size=60) and not has(size=264) and not has(size=257)
    assert not has(capability=(7, 5)) and not has(is_cuda=False)


class Kernel:
    """CUDA's kernel for documents of different lengths: the last query of each sees all of its keys."""

    bounds = (TABLE[0], TABLE[1], 9, 9, 0.0, True)  # at most 9 positions, no dropout, causal

    def __init__(self, window):
        self.window = window

    def _check(self, *given, **seen):
        for mine, expected in zip(given, self.bounds, strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(expected))
        assert seen == ({"window_size_left": self.window - 1, "window_size_right": 0} if self.window else {})

    def _flash_attention_forward(self, query, key, value, *rest, **seen):
        *bounds, debug = rest
        self._check(*bounds, **seen)
        assert debug is False
        return (*dense(query, key, value, self.window), None, None, None)

    def _flash_attention_backward(self, grad, query, key, value, output, lse, *rest, **seen):
        *bounds, seed, offset = rest
        self._check(*bounds, **seen)
        assert seed.dtype == offset.dtype == torch.uint64 and seed.numel() == offset.numel() == 0
        parts = [torch.zeros_like(each) for each in (query, key, value)]
        for queries, before, here in module._documents(TABLE):
            keys = slice(before.start, here.stop)
            given = grad[queries], query[queries], key[keys], value[keys], output[queries], lse[:, queries]
            found = module._math_backward(*given, True, self.window)
            for whole, where, part in zip(parts, (queries, keys, keys), found, strict=True):
                whole[where] += part
        return tuple(parts)


def test_the_kernel_of_a_gpu_is_asked_for_the_same(window, monkeypatch):
    leaves = tensors()
    output, lse = (each.detach() for each in dense(*leaves, window))
    bounds = TABLE, 9, window
    given = torch.ones_like(output), *(each.detach() for each in leaves), output, lse, *bounds
    forward, backward = causal_attention(*given[1:4], *bounds), causal_attention_backward(*given)
    monkeypatch.setattr(module, "_has_flash", lambda query, windowed: windowed == (window > 0))
    monkeypatch.setattr(module, "_aten", Kernel(window))
    torch.testing.assert_close(causal_attention(*given[1:4], *bounds), forward)
    torch.testing.assert_close(causal_attention_backward(*given), backward)


def by_the_processor(query, key, value, table, longest, window):
    return module._by_document(module._flash_for_cpu, query, key, value, table, window)


def larger(*given):
    output, lse = by_the_processor(*given)
    return 1.2 * output, lse


def its_backward(grad, query, key, value, output, lse, table, longest, window):
    given = grad, query, key, value, output, lse, table, window
    return module._by_document_backward(module._flash_for_cpu_backward, *given)


def refused(*given):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("forward", "backward", "amiss"),
    [
        (by_the_processor, its_backward, ""),
        (
            lambda *given: (1.2 * by_the_processor(*given)[0], by_the_processor(*given)[1]),
            its_backward,
            "it differs by",
        ),
        (by_the_processor, lambda *given: (*its_backward(*given)[:2], its_backward(*given)[1]), "it differs by"),
        (refused, its_backward, "no kernel image"),
    ],
)
def test_a_kernel_that_says_something_else_is_not_used(window, monkeypatch, forward, backward, amiss):
    monkeypatch.setattr(module, "_flash", forward)
    monkeypatch.setattr(module, "_flash_backward", backward)
    module._agrees.cache_clear()
    before = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            assert module._agrees(torch.device("cpu"), torch.bfloat16, 16, window > 0) == (not amiss)
    assert [amiss in str(each.message) for each in warned] == [True] * bool(amiss)
    assert torch.equal(torch.get_rng_state(), before)
    module._agrees.cache_clear()
