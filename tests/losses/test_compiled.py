"""What is compiled for a processor gives what torch's operations give one by one, without recompiling for sizes."""

import math
import warnings

import pytest
import torch

from specdraft.losses import comparison
from specdraft.losses.chunked import FrozenHead, Step, Teacher, distillation_loss
from specdraft.losses.compiled import Compiled
from specdraft.losses.divergence import DIVERGENCES, divergence, forward_kl
from specdraft.losses.eager import Eager

V, VD = 300, 150
CPU = torch.device("cpu")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in DIVERGENCES if name != "forward_kl"]


@pytest.fixture(autouse=True, scope="module")
def afresh():
    """Graphs of other tests do not count."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def problem(count, pruned, dtype=torch.float32):
    logits = 3 * torch.randn(count, V)
    ids = torch.randperm(V)[:VD].sort().values if pruned else None
    z = 3 * torch.randn(count, VD if pruned else V)
    return logits.to(dtype), ids, torch.randint(-1, z.shape[1], (count,)), z.to(dtype)


def both(name, logits, ids, label, z, index, keep):
    """The target and the comparison, by torch and compiled."""
    asked = divergence(name)
    found = []
    for compare in (Eager(asked, len(logits), z.shape[1], torch.float32, CPU), Compiled(asked)):
        target = compare.target(logits.clone(), ids, label)
        found.append((*target, *compare.draft(z.clone(), target, index, keep)))
    return found


@pytest.mark.parametrize("name", ["forward_kl", *SLOW])
@pytest.mark.parametrize("pruned", [False, True])
def test_it_is_what_torch_gives(name, pruned):
    made = []
    for count in (5, 9, 33):
        logits, ids, label, z = problem(count, pruned)
        index = torch.tensor([0, 2, 3])
        for chosen, of in ((None, z), (index, z[index])):
            for keep in (False, True):
                for mine, theirs in zip(*both(name, logits, ids, label, of, chosen, keep), strict=True):
                    assert mine.dtype == theirs.dtype
                    torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=3e-6)
        made.append(graphs())
    assert made[0] == made[-1], "a graph for a number of positions"


@pytest.mark.slow
def test_narrow_logits_are_compared_in_fp32_and_keep_their_dtype():
    logits, ids, label, z = problem(9, pruned=True, dtype=torch.bfloat16)
    for mine, theirs in zip(*both("forward_kl", logits, ids, label, z, None, False), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=3e-6 if mine.dtype == torch.float32 else 1e-3)


def test_the_gradient_takes_the_place_of_logits_that_nobody_keeps():
    logits, ids, label, z = problem(9, pruned=False)
    compare, before = Compiled(forward_kl), z.clone()
    target = compare.target(logits, ids, label)
    assert target.p is logits, "nor is a second tensor made of the target's"
    assert compare.draft(z, target, None, keep=True).grad is not z and torch.equal(z, before)
    assert compare.draft(z, target, None, keep=False).grad is z and not torch.equal(z, before)


def test_autocast_leaves_sums_alone():
    logits, ids, label, z = problem(9, pruned=False)
    compare, found = Compiled(forward_kl), []
    for active in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=active):
            target = compare.target(logits.clone(), ids, label)
            found.append((*target, *compare.draft(z.clone(), target, None, keep=False)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_forbidden_tokens_and_what_is_no_number():
    logits, ids, label, z = problem(4, pruned=False)
    z[0, 3:9] = logits[0, 3:9] = -math.inf
    eager, compiled = both("forward_kl", logits, ids, label, z, None, True)
    for mine, theirs in zip(eager, compiled, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=3e-6)
    z[1, 7] = math.nan
    *_, values, alpha, drafted, _ = both("forward_kl", logits, ids, label, z, None, True)[1]
    assert values.isnan().tolist() == alpha.isnan().tolist() == [False, True, False, False]
    assert (drafted < V).all(), "a token all the same"


def loss(many, monkeypatch, frozen=False):
    """A loss and its gradients where a window of that many elements is compiled, by a head that learns or not."""
    monkeypatch.setattr(comparison, "MANY", many)
    own = torch.Generator().manual_seed(0)
    projection, last = torch.randn(V, 16, generator=own), torch.randn(40, 16, generator=own)
    hidden, weight = (torch.randn(size, 16, generator=own, requires_grad=True) for size in (30, V))
    teacher = Teacher(last, lambda given: given @ projection.T, None)
    head = FrozenHead(lambda given: given @ weight.detach().T, V) if frozen else weight
    made, (result,) = distillation_loss([head], teacher, [Step(hidden, torch.arange(5, 35), 1.0)], size=16)
    made.backward()
    return made.detach(), hidden.grad, torch.zeros(1) if frozen else weight.grad, result.alpha, result.matched


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_of_large_windows_takes_it(monkeypatch, frozen):
    made = []
    monkeypatch.setattr(comparison, "_agreeing", {})
    monkeypatch.setattr(
        Compiled, "draft", lambda *given, real=Compiled.draft, **named: made.append(1) or real(*given, **named)
    )
    eager = loss(16 * V + 1, monkeypatch, frozen)
    assert not made
    compiled = loss(16 * V, monkeypatch, frozen)
    assert len(made) == 3, "two windows, and one beside torch"
    torch.testing.assert_close(compiled, eager, rtol=2e-5, atol=3e-6)


def test_without_a_compiler_it_is_torch_with_one_line(monkeypatch):
    def refuse(*given, **named):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(comparison, "_agreeing", {})
    monkeypatch.setattr(Compiled, "target", refuse)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            assert loss(1, monkeypatch)[0].isfinite()
    assert ["no C++ compiler" in str(each.message) for each in warned] == [True]
