"""The chunked loss against the plain one, in fp64: value, gradients, and the sums it counts on the way."""

import pytest
import torch

from specdraft.losses.chunked import Step, Teacher, distillation_loss, reference_loss

V, VD, H, R = 50, 20, 8, 60


def problem(pruned: bool, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(V, H, generator=g, dtype=torch.float64)
    last = torch.randn(R, H, generator=g, dtype=torch.float64)
    ids = torch.randperm(V, generator=g)[:VD].sort().values if pruned else None
    weight = torch.randn(VD if pruned else V, H, generator=g, dtype=torch.float64, requires_grad=True)
    steps = []
    rows = torch.arange(R - 6)
    for step in range(4):
        rows = rows[torch.rand(len(rows), generator=g) < 0.8]  # nested, as the training-time test makes them
        hidden = torch.randn(len(rows), H, generator=g, dtype=torch.float64, requires_grad=True)
        steps.append(Step(hidden, rows + 1 + step, 0.8**step))
    return weight, Teacher(last, lambda hidden: hidden @ head.T, ids), steps


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [16, 25, 1000])
def test_value_and_gradients_equal_the_reference(pruned, rows_per_chunk):
    weight, teacher, steps = problem(pruned)
    loss, _ = distillation_loss(weight, teacher, steps, chunk_elements=rows_per_chunk * len(weight))
    (3 * loss).backward()
    ours = [weight.grad, *(step.hidden.grad for step in steps)]

    weight, teacher, steps = problem(pruned)
    expected = reference_loss(weight, teacher, steps)
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(ours, [weight.grad, *(step.hidden.grad for step in steps)], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_gradients_equal_finite_differences():
    weight, teacher, steps = problem(pruned=True)

    def loss(weight, *hiddens):
        moved = [Step(h, s.positions, s.weight) for h, s in zip(hiddens, steps, strict=True)]
        return distillation_loss(weight, teacher, moved, chunk_elements=16 * VD)[0]

    assert torch.autograd.gradcheck(loss, (weight, *(step.hidden for step in steps)), fast_mode=True)


def test_sums_measure_acceptance_against_the_full_vocabulary():
    weight, teacher, steps = problem(pruned=True)
    _, results = distillation_loss(weight, teacher, steps, chunk_elements=16 * VD)
    for step, result in zip(steps, results, strict=True):
        p = teacher.logits(teacher.last[step.positions]).softmax(-1)  # all of V
        q = torch.zeros_like(p)
        q[:, teacher.draft_ids] = (step.hidden @ weight.T).softmax(-1).detach()
        torch.testing.assert_close(result.alpha_sum, torch.minimum(p, q).sum(), rtol=1e-12, atol=1e-12)
        assert torch.equal(result.matched, p.argmax(-1) == q.argmax(-1))


def test_a_best_token_outside_the_draft_vocabulary_is_a_miss():
    head = torch.eye(3, dtype=torch.float64)
    last = torch.tensor([[0.0, 0.0, 9.0]], dtype=torch.float64)  # the target wants token 2
    teacher = Teacher(last, lambda hidden: hidden @ head.T, torch.tensor([0, 1]))
    step = Step(torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64), torch.tensor([0]), 1.0)
    _, (result,) = distillation_loss(head[:2].clone(), teacher, [step])
    assert not result.matched.any() and result.alpha_sum < 1e-3


def test_identical_distributions_have_no_divergence():
    _, teacher, steps = problem(pruned=False)
    same = [Step(teacher.last[s.positions].clone(), s.positions, s.weight) for s in steps]
    head = teacher.logits(torch.eye(H, dtype=torch.float64)).T
    loss, results = distillation_loss(head, teacher, same)
    assert loss.abs() < 1e-12
    assert all(r.matched.all() and abs(r.alpha_sum - len(r.matched)) < 1e-9 for r in results)


def test_bf16_weights_accumulate_in_fp32():
    weight, teacher, steps = problem(pruned=True)
    exact, _ = distillation_loss(weight, teacher, steps)
    half = [Step(s.hidden.detach().bfloat16(), s.positions, s.weight) for s in steps]
    narrow = weight.detach().bfloat16().requires_grad_()
    loss, _ = distillation_loss(narrow, Teacher(teacher.last, teacher.logits, teacher.draft_ids), half)
    loss.backward()
    assert loss.dtype == torch.float32 and narrow.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), exact, rtol=2e-2, atol=0)
