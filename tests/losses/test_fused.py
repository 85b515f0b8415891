"""The kernel against the plain formulas: on a GPU where there is one, else by Triton's interpreter, which has to be
asked for before Triton is imported and therefore has a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from specdraft.errors import UserError
from specdraft.losses import chunked
from specdraft.losses.chunked import FrozenHead, Step, Teacher, distillation_loss
from specdraft.losses.divergence import DIVERGENCES, divergence
from specdraft.losses.eager import Eager
from tests.losses import reference
from tests.losses.reference import reference_loss
from tests.losses.test_divergence import PAIRS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="Triton is not installed: it comes with CUDA builds of torch")
needs_kernel = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="run by the test below")
DEVICE = "cpu" if INTERPRETED else "cuda"
C, V, VD, BLOCK = 6, 75, 37, 16  # no multiples of a block


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the others run in this process")
def test_the_kernel_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--numprocesses", "auto", __file__]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_kernel_compiles_for_a_gpu(name):
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from specdraft.losses import fused

    types = dict.fromkeys(("z", "grad", "logits"), "*bf16")
    types |= dict.fromkeys(("log_normalizer", "p_log_p", "mass", "values", "alpha"), "*fp32")
    types |= dict.fromkeys(("label", "index", "drafted"), "*i64") | {"size": "i32", "option": "fp32"}
    constants = {"kind": name, "indexed": True, "block": fused.BLOCK}
    names = fused._compare.arg_names
    signature = {key: types.get(key, "constexpr") for key in names}
    source = ASTSource(fn=fused._compare, signature=signature, constexprs=constants)
    kernel = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused.WARPS})
    assert "st.global" in kernel.asm["ptx"]


@pytest.fixture
def fused(monkeypatch):
    from specdraft.losses import fused

    monkeypatch.setattr(fused, "BLOCK", BLOCK)
    monkeypatch.setattr(fused, "WARPS", 1)
    return fused


def problem(pruned, scale=1.5, dtype=torch.float32):
    """Draft logits, target logits, draft ids, labels as draft ids."""
    z, logits = (scale * torch.randn(C, size, device=DEVICE).to(dtype) for size in (VD if pruned else V, V))
    ids = torch.randperm(V, device=DEVICE)[:VD].sort().values if pruned else None
    label = torch.randint(-1, z.shape[1], (C,), device=DEVICE)
    label[:2] = -1
    return z, logits, ids, label


def expected(formula, z, logits, ids, label):
    """Values, alpha and gradient in fp64."""
    z, logits = z.double().requires_grad_(), logits.double()
    inside = slice(None) if ids is None else ids
    mass, log_p = logits.softmax(-1)[:, inside].sum(-1), logits[:, inside].log_softmax(-1)
    log_q = z.log_softmax(-1)
    values = formula(log_p, log_q, mass, label)
    (grad,) = torch.autograd.grad(values.sum(), z)
    alpha = torch.minimum(mass[:, None] * log_p.exp(), log_q.exp()).sum(-1)
    return values.detach(), alpha.detach(), grad


@needs_kernel
@pytest.mark.parametrize(("spec", "formula"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize(("pruned", "keep"), [(False, True), (True, False)])
def test_values_and_gradients_equal_the_plain_formulas(fused, spec, formula, pruned, keep):
    z, logits, ids, label = problem(pruned)
    values, alpha, grad = expected(formula, z, logits, ids, label)
    best, drafted, before = logits.argmax(-1), z.argmax(-1), z.clone()
    compare = fused.Fused(divergence(spec))
    target = compare.target(logits, ids, label)
    got = compare.draft(z, target, None, keep)
    torch.testing.assert_close(got.values.double(), values, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(got.alpha.double(), alpha, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(got.grad.double(), grad, rtol=2e-4, atol=1e-7)
    assert torch.equal(got.drafted, drafted) and torch.equal(target.best, best)
    assert torch.equal(z, before) if keep else got.grad is z


@needs_kernel
@pytest.mark.parametrize("pruned", [False, True])
def test_chunks_take_their_positions_of_the_window(fused, pruned):
    z, logits, ids, label = problem(pruned)
    compare, index = fused.Fused(divergence("cross_entropy")), torch.tensor([1, 2, 5], device=DEVICE)
    target = compare.target(logits, ids, label)
    part = compare.draft(z[index], target, index, keep=True)
    whole = compare.draft(z, target, None, keep=True)
    assert all(torch.equal(mine, other[index]) for mine, other in zip(part, whole, strict=True))


@needs_kernel
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("pruned", [False, True])
def test_what_underflows_and_what_is_forbidden_is_as_by_torch(fused, name, pruned):
    z, logits, ids, label = problem(pruned, scale=40.0)  # p and q down to exp(-200)
    forbidden = torch.rand(V, device=DEVICE) < 0.3
    logits[:, forbidden] = -torch.inf
    z[:, forbidden if ids is None else forbidden[ids]] = -torch.inf
    label = label.where(~z.gather(1, label.clamp(min=0)[:, None])[:, 0].isneginf(), -1)
    given = divergence(name), C, z.shape[1], torch.float32, z.device
    results = []
    for compare in (fused.Fused(given[0]), Eager(*given)):
        target = compare.target(logits.clone(), ids, label)
        results.append((target.mass, *compare.draft(z, target, None, keep=True)))
    for kernels, torchs in zip(*results, strict=True):
        assert torch.isfinite(kernels).all()
        torch.testing.assert_close(kernels, torchs, rtol=1e-3, atol=1e-3)


@needs_kernel
@pytest.mark.parametrize("name", DIVERGENCES)
def test_what_is_not_a_number_is_not_hidden(fused, name):
    z, logits, ids, label = problem(pruned=False)
    z[0, 3] = torch.nan
    compare = fused.Fused(divergence(name))
    got = compare.draft(z, compare.target(logits, ids, label.clamp(min=0)), None, keep=False)
    assert got.values[0].isnan() and got.grad[0].isnan().all() and not got.values[1:].isnan().any()


@needs_kernel
def test_the_first_of_equal_tokens_is_the_best(fused):
    z, logits = torch.zeros(1, V, device=DEVICE), torch.zeros(1, V, device=DEVICE)
    z[0, [70, 40, 33]], logits[0, [60, 8]] = 1.0, 2.0
    compare = fused.Fused(divergence("forward_kl"))
    target = compare.target(logits, None, None)
    assert target.best.item() == 8 and compare.draft(z, target, None, keep=False).drafted.item() == 33


@needs_kernel
def test_cross_entropy_wants_labels(fused):
    with pytest.raises(UserError, match="cross_entropy"):
        fused.Fused(divergence("cross_entropy")).target(torch.zeros(1, V, device=DEVICE), None, None)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_read_and_their_gradient_written_in_their_dtype(fused, dtype):
    z, logits, ids, label = problem(pruned=True, dtype=dtype)
    values, _, grad = expected(reference.forward_kl, z, logits, ids, label)
    compare = fused.Fused(divergence("forward_kl"))
    got = compare.draft(z, compare.target(logits, ids, label), None, keep=False)
    assert got.grad.dtype == dtype and got.values.dtype == torch.float32
    torch.testing.assert_close(got.values.double(), values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.grad.double(), grad, rtol=1e-2, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("pruned", [False, True])
def test_a_whole_loss_equals_the_reference(fused, monkeypatch, name, pruned):
    monkeypatch.setattr(chunked, "comparison", lambda divergence, *_: fused.Fused(divergence))
    hidden, rows = 8, 12
    projection = torch.randn(V, hidden, device=DEVICE)
    ids = torch.randperm(V, device=DEVICE)[:VD].sort().values if pruned else None
    labels = torch.randint(V, (rows,), device=DEVICE)
    teacher = Teacher(torch.randn(rows, hidden, device=DEVICE), lambda h: h @ projection.T, ids, labels)
    weight = torch.randn(VD if pruned else V, hidden, device=DEVICE)
    places = [torch.arange(9, device=DEVICE), torch.arange(3, 12, 4, device=DEVICE)]
    results = []
    for loss in (
        lambda weight, steps: distillation_loss(weight, teacher, steps, divergence(name), 16)[0],
        lambda weight, steps: distillation_loss([FrozenHead(lambda h: h @ weight.T, len(weight))], teacher, steps,
                                                divergence(name), 16)[0],
        lambda weight, steps: reference_loss(weight, teacher, steps, PAIRS[name][1]),
    ):  # fmt: skip
        torch.manual_seed(0)
        own = weight.clone().requires_grad_()
        steps = [Step(torch.randn(len(at), hidden, device=DEVICE, requires_grad=True), at, 0.5) for at in places]
        value = loss(own, steps)
        value.backward()
        results.append([value.detach(), *(step.hidden.grad for step in steps), own.grad])
    for ours in results[:2]:
        for mine, theirs in zip(ours, results[2], strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert results[0][-1] is not None and results[1][-1] is None
