"""The chunked loss against the plain one, in fp64: value, gradients, and the sums it counts on the way."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdraft.losses import chunked
from specdraft.losses.chunked import Correction, FrozenHead, Step, Teacher, distillation_loss
from specdraft.losses.divergence import divergence
from tests.drafters.counting import CountedFlops
from tests.losses import reference
from tests.losses.reference import reference_loss

pytestmark = pytest.mark.filterwarnings("error")
V, VD, H, R = 50, 20, 8, 60

FORMULAS = {
    "forward_kl": reference.forward_kl,
    "reverse_kl": reference.reverse_kl,
    "jsd": reference.jsd(0.5),
    "total_variation": reference.total_variation,
    "lk_hybrid": reference.lk_hybrid(3.0),
    "cross_entropy": reference.cross_entropy,
    "ce_l1": reference.ce_l1(0.1),
}


def problem(pruned: bool, heads: int = 1, seed: int = 0):
    """Weights, one per head, a teacher, and four steps; with several heads each step has its own."""
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(V, H, generator=g, dtype=torch.float64)
    last = torch.randn(R, H, generator=g, dtype=torch.float64)
    ids = torch.randperm(V, generator=g)[:VD].sort().values if pruned else None
    size = VD if pruned else V
    weights = [torch.randn(size, H, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(heads)]
    labels = torch.randint(V, (R,), generator=g)
    steps = []
    rows = torch.arange(R - 6)
    for step in range(4):
        rows = rows[torch.rand(len(rows), generator=g) < 0.8]  # nested, as the training-time test makes them
        hidden = torch.randn(len(rows), H, generator=g, dtype=torch.float64, requires_grad=True)
        steps.append(Step(hidden, rows + 1 + step, 0.8**step, head=step % heads))
    return weights, Teacher(last, lambda hidden: hidden @ head.T, ids, labels), steps


def gradients(weights, steps):
    return [tensor.grad for tensor in (*weights, *(step.hidden for step in steps))]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [16, 25, 1000])
def test_value_and_gradients_equal_the_reference(pruned, heads, name, rows_per_chunk):
    weights, teacher, steps = problem(pruned, heads)
    loss, _ = distillation_loss(weights, teacher, steps, divergence(name), rows_per_chunk)
    (3 * loss).backward()
    ours = gradients(weights, steps)

    weights, teacher, steps = problem(pruned, heads)
    expected = reference_loss(weights, teacher, steps, FORMULAS[name])
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(ours, gradients(weights, steps), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("rows_per_chunk", [16, 1000])
@pytest.mark.parametrize("name", ["forward_kl", "lk_hybrid"])
def test_positions_count_as_much_as_their_shares(name, rows_per_chunk):
    def losses(loss):
        weights, teacher, steps = problem(pruned=True, heads=2)
        g = torch.Generator().manual_seed(5)
        for step in steps[1:]:  # the first has none
            step.shares = 3 * torch.rand(len(step.positions), generator=g, dtype=torch.float64)
            step.total = 17.0
        value = loss(weights, teacher, steps)
        value.backward()
        return [value, *gradients(weights, steps)]

    counted = []

    def ours(weights, teacher, steps):
        loss, results = distillation_loss(weights, teacher, steps, divergence(name), rows_per_chunk)
        unweighed = [replace(step, shares=None) for step in steps]
        _, plain = distillation_loss(weights, teacher, unweighed, divergence(name), rows_per_chunk)
        counted.extend(zip(results, plain, strict=True))
        return loss

    found = losses(ours)
    expected = losses(lambda weights, teacher, steps: reference_loss(weights, teacher, steps, FORMULAS[name]))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
    for result, plain in counted:  # metrics are of the positions, whatever they count
        assert result.loss_sum == plain.loss_sum and torch.equal(result.alpha, plain.alpha)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [16, 1000])
def test_logits_may_be_the_sum_of_two_projections(rows_per_chunk, frozen):
    def losses(loss):
        (base, *_), teacher, steps = problem(pruned=True)
        g = torch.Generator().manual_seed(6)
        added = torch.randn(VD, 3, generator=g, dtype=torch.float64, requires_grad=True)
        base.requires_grad_(not frozen)
        for step in steps[:3]:  # the last has none
            step.shares = torch.rand(len(step.positions), generator=g, dtype=torch.float64)
            given = torch.randn(len(step.positions), 3, generator=g, dtype=torch.float64, requires_grad=True)
            step.correction = Correction(given, 1)
        value = loss([base, added], teacher, steps)
        value.backward()
        found = [base.grad, added.grad, *(hidden.grad for step in steps for hidden, _ in step.terms)]
        assert (found[0] is None) == frozen and len(found) == 2 + 4 + 3
        return [value, *found[frozen:]]

    found = losses(lambda *given: distillation_loss(*given, size=rows_per_chunk)[0])
    for mine, theirs in zip(found, losses(reference_loss), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_gradients_equal_finite_differences():
    (weight,), teacher, steps = problem(pruned=True)
    given = [weight, *(step.hidden for step in steps)]

    def loss(*moved):
        of = [replace(step, hidden=hidden) for step, hidden in zip(steps, moved[1:], strict=True)]
        return distillation_loss(moved[0], teacher, of, size=16)[0]

    loss(*given).backward()
    generator, small = torch.Generator().manual_seed(7), 1e-5
    for number, tensor in enumerate(given):
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        ends = [[*given[:number], tensor + sign * small * direction, *given[number + 1 :]] for sign in (1, -1)]
        above, below = (loss(*end).item() for end in ends)
        assert (tensor.grad * direction).sum().item() == pytest.approx((above - below) / (2 * small), rel=1e-7)


def test_gradients_are_scaled_where_they_are_and_given_once():
    (weight,), teacher, steps = problem(pruned=True)
    value = distillation_loss(weight, teacher, steps)[0]
    with Made() as made:
        (3 * value).backward(retain_graph=True)
    assert not [name for name, elements in made.tensors if elements == weight.numel()]
    again = weight.grad / 3
    weight.grad = None
    distillation_loss(weight, teacher, steps)[0].backward()
    torch.testing.assert_close(weight.grad, again)
    with pytest.raises(RuntimeError, match="once only"):
        value.backward()


class Made(TorchDispatchMode):
    """Notes the operations that make a tensor, and how many elements it has."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in before:
            self.tensors.append((str(func), out.numel()))
        return out


@pytest.mark.parametrize("size", [16, 25])
def test_the_target_is_asked_once_per_position_for_all_heads(size):
    weights, teacher, steps = problem(pruned=True, heads=4)
    asked = []

    def logits(hidden):
        asked.append(len(hidden))
        return teacher.logits(hidden)

    counted = Teacher(teacher.last, logits, teacher.draft_ids)
    distillation_loss(weights, counted, steps, size=size)
    assert max(asked) == size and sum(asked) == len({p for step in steps for p in step.positions.tolist()})


def test_a_frozen_weight_gets_no_gradient_and_the_rest_the_same():
    weights, teacher, steps = problem(pruned=True, heads=2)
    distillation_loss(weights, teacher, steps)[0].backward()
    expected = gradients(weights, steps)

    weights, teacher, steps = problem(pruned=True, heads=2)
    weights[1].requires_grad_(False)
    loss, _ = distillation_loss(weights, teacher, steps)
    assert [tensor is None for tensor in loss.grad_fn.gradients[:2]] == [False, True], "none is computed"
    loss.backward()
    got = gradients(weights, steps)
    assert got[1] is None and expected[1].abs().max() > 0
    del got[1], expected[1]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", FORMULAS)
def test_a_frozen_head_passes_gradients_on(name):
    (weight,), teacher, steps = problem(pruned=True)
    capped = FrozenHead(lambda hidden: torch.tanh(hidden @ weight.detach().T / 4), VD)  # backward wants its output
    loss, results = distillation_loss([capped], teacher, steps, divergence(name), 16)
    loss.backward()
    ours = [step.hidden.grad for step in steps]

    _, teacher, steps = problem(pruned=True)
    projected = [Step(capped.logits(step.hidden), step.positions, step.weight) for step in steps]
    expected, others = distillation_loss(torch.eye(VD, dtype=torch.float64), teacher, projected, divergence(name))
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for mine, step, result, other in zip(ours, steps, results, others, strict=True):
        torch.testing.assert_close(mine, step.hidden.grad, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(result.alpha_sum, other.alpha_sum, rtol=1e-12, atol=0)


@pytest.mark.parametrize("heads", [1, 4])
def test_steps_without_rows_add_nothing_but_get_gradients(heads):
    weights, teacher, steps = problem(pruned=True, heads=heads)
    nothing = torch.zeros(0, H, dtype=torch.float64, requires_grad=True)
    without = [steps[0], *(Step(nothing, step.positions[:0], step.weight, step.head) for step in steps[1:])]
    loss, results = distillation_loss(weights, teacher, without)
    loss.backward()
    torch.testing.assert_close(loss, reference_loss(weights, teacher, steps[:1]), rtol=1e-12, atol=0)
    assert weights[0].grad.abs().max() > 0 and all((weight.grad == 0).all() for weight in weights[1:])
    assert all(result.loss_sum == 0 and len(result.matched) == 0 for result in results[1:])

    first_without = [Step(nothing, steps[0].positions[:0], 1.0), steps[1]]
    loss, _ = distillation_loss(weights, teacher, first_without)
    expected = reference_loss(weights, teacher, steps[1:2])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert reference_loss(weights, teacher, first_without) == expected

    loss, _ = distillation_loss(weights, teacher, without[1:])
    loss.backward()
    assert loss == 0 and nothing.grad.shape == (0, H)


def test_a_row_counts_its_share_of_the_mean():
    hidden, positions = torch.zeros(4, H), torch.arange(4)
    assert Step(hidden, positions, 0.8).scale == 0.2
    assert Step(hidden[:1], positions[:1], 0.8).scale == Step(hidden[:0], positions[:0], 0.8).scale == 0.8
    assert Step(hidden, positions, 0.8, total=16.0).scale == 0.05


def test_the_target_gets_no_gradient():
    weights, teacher, steps = problem(pruned=True)
    teacher.last.requires_grad_(True)
    (distillation_loss(weights, teacher, steps)[0] + reference_loss(weights, teacher, steps)).backward()
    assert teacher.last.grad is None and weights[0].grad is not None


class Products(TorchDispatchMode):
    """The dtypes of operands, and the most elements of a product."""

    def __init__(self):
        super().__init__()
        self.dtypes, self.most = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ in {"mm", "addmm", "addmm_", "_linear_pointwise"}:
            self.dtypes |= {tensor.dtype for tensor in args if isinstance(tensor, torch.Tensor)}
            self.most = max(self.most, out.numel())
        return out


def test_autocast_computes_all_products_of_fp32_in_bf16():
    (weight,), teacher, steps = problem(pruned=True)
    wide = [Step(s.hidden.detach().float().requires_grad_(), s.positions, s.weight) for s in steps]
    single = weight.detach().float().requires_grad_()
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        loss, results = distillation_loss(single, replace(teacher, logits=lambda h: teacher.logits(h).float()), wide)
    assert products.dtypes == {torch.bfloat16, torch.float64}, "the teacher's alone are in fp64"
    loss.backward()
    assert {single.grad.dtype, loss.dtype, results[0].alpha_sum.dtype, wide[0].hidden.grad.dtype} == {torch.float32}
    expected = distillation_loss(weight, teacher, steps)[0]
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=0)
    for mine, theirs in ((single, weight), *((a.hidden, b.hidden) for a, b in zip(wide, steps, strict=True))):
        torch.testing.assert_close(
            mine.grad.double(), theirs.grad, rtol=5e-2, atol=2e-2 * theirs.grad.abs().max().item()
        )


def test_autocast_leaves_fp64_alone():
    (weight,), teacher, steps = problem(pruned=True)
    expected, _ = distillation_loss(weight, teacher, steps)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(distillation_loss(weight, teacher, steps)[0], expected)


@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize(("rows", "dtype"), [(40, torch.float32), (40, torch.bfloat16)])
def test_products_are_added_without_another_tensor_of_the_weights_size(monkeypatch, rows, dtype, by_onednn):
    monkeypatch.setattr(chunked, "_ROWS", 7)
    monkeypatch.setattr(chunked, "is_faster", lambda: by_onednn)
    total, a, b = torch.randn(VD, H), torch.randn(rows, VD).to(dtype), torch.randn(rows, H).to(dtype)
    expected = total.double() + 0.25 * a.double().T @ b.double()
    in_place = dtype == torch.float32 and not by_onednn
    with Products() as products:
        chunked._add_product(total, a, b, 0.25)
    assert products.most == (VD * H if in_place else 7 * H) and products.dtypes <= {dtype, total.dtype}
    torch.testing.assert_close(total.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-2)


def test_a_gpu_adds_narrow_products_where_they_are_made(monkeypatch):
    added = []

    def addmm(total, a, b, out_dtype, alpha, out):  # as cuBLAS does, which a processor has not
        added.append((a.dtype, b.dtype, out_dtype))
        assert out is total
        return out.addmm_(a.to(out_dtype), b.to(out_dtype), alpha=alpha)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(chunked, "_adds_wider", lambda device: True)
    monkeypatch.setattr(chunked, "is_faster", lambda: False)
    (weight,), teacher, steps = problem(pruned=True)
    distillation_loss(weight, teacher, steps)[0].backward()
    wide = [Step(s.hidden.detach().float(), s.positions, s.weight) for s in steps]
    single = weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        distillation_loss(single, teacher, wide, size=16)[0].backward()
    assert set(added) == {(torch.bfloat16, torch.bfloat16, torch.float32)} and len(added) > len(steps)
    torch.testing.assert_close(single.grad.double(), weight.grad, rtol=5e-2, atol=2e-2 * weight.grad.abs().max().item())


@pytest.mark.parametrize(
    ("device", "cuda", "capability", "wider"),
    [
        ("cuda", "13.0", (8, 0), True),
        ("cuda", "13.0", (7, 5), False),
        ("cuda", None, (9, 4), False),
        ("cpu", "13.0", (9, 0), False),
    ],
)
def test_cublas_adds_wider_since_ampere(monkeypatch, device, cuda, capability, wider):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chunked._adds_wider(torch.device(device)) is wider


def test_a_validation_makes_no_gradients():
    weights, teacher, steps = problem(pruned=True, heads=2)
    expected, _ = distillation_loss(weights, teacher, steps)
    with torch.no_grad(), CountedFlops() as flops:
        loss, _ = distillation_loss(weights, teacher, steps)
    assert torch.equal(loss, expected) and not loss.requires_grad
    chosen = sum(len(step.positions) for step in steps)
    asked = len({position for step in steps for position in step.positions.tolist()})
    assert flops.count.total() == 2 * H * (VD * chosen + V * asked)


def test_every_label_finds_its_draft_id():
    last, ids = torch.zeros(6, H, dtype=torch.float64), torch.tensor([1, 2, 4])
    teacher = Teacher(last, lambda hidden: hidden[:, :6], ids, labels=torch.arange(6))
    assert teacher.label(torch.arange(6)).tolist() == [-1, 0, 1, -1, 2, -1]
    assert teacher.label(torch.tensor([4, 0])).tolist() == [2, -1]


def test_labels_outside_the_draft_vocabulary_add_nothing():
    (weight,), teacher, steps = problem(pruned=True)
    known = torch.isin(teacher.labels, teacher.draft_ids)
    _, results = distillation_loss(weight, teacher, steps, divergence("cross_entropy"))
    _, of_kl = distillation_loss(weight, teacher, steps)
    for step, result, other in zip(steps, results, of_kl, strict=True):
        inside = known[step.positions]
        assert 0 < inside.sum() < len(inside)
        log_q = (step.hidden @ weight.T).log_softmax(-1).detach()[inside]
        label = torch.searchsorted(teacher.draft_ids, teacher.labels[step.positions][inside])
        torch.testing.assert_close(result.loss_sum, -log_q.gather(1, label[:, None]).sum(), rtol=1e-12, atol=0)
        assert torch.equal(result.matched, other.matched) and result.alpha_sum == other.alpha_sum, (
            "labels are no target"
        )


@pytest.mark.parametrize("name", FORMULAS)
def test_sums_measure_acceptance_against_the_full_vocabulary(name):
    weights, teacher, steps = problem(pruned=True, heads=2)
    _, results = distillation_loss(weights, teacher, steps, divergence(name), size=16)
    for step, result in zip(steps, results, strict=True):
        p = teacher.logits(teacher.last[step.positions]).softmax(-1)  # all of V
        q = torch.zeros_like(p)
        q[:, teacher.draft_ids] = (step.hidden @ weights[step.head].T).softmax(-1).detach()
        torch.testing.assert_close(result.alpha_sum, torch.minimum(p, q).sum(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result.mass_sum, p[:, teacher.draft_ids].sum(), rtol=1e-12, atol=1e-12)
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


@pytest.mark.parametrize("name", FORMULAS)
def test_bf16_weights_accumulate_in_fp32(name):
    weights, teacher, steps = problem(pruned=True, heads=2)
    exact, _ = distillation_loss(weights, teacher, steps, divergence(name))
    half = [Step(s.hidden.detach().bfloat16(), s.positions, s.weight, s.head) for s in steps]
    narrow = [weight.detach().bfloat16().requires_grad_() for weight in weights]
    loss, results = distillation_loss(narrow, teacher, half, divergence(name))
    loss.backward()
    assert loss.dtype == results[0].alpha_sum.dtype == torch.float32
    assert all(weight.grad.dtype == torch.bfloat16 for weight in narrow)
    torch.testing.assert_close(loss.double(), exact, rtol=2e-2, atol=0)


def test_bf16_gradients_of_many_chunks_are_summed_in_fp32():
    weights, teacher, _ = problem(pruned=True)
    rows = 16 * 1024  # all alike: in bf16 the sum would stop growing after 256 of the 1,024 chunks
    alike = Teacher(teacher.last[:1].expand(rows, -1), teacher.logits, teacher.draft_ids)
    hidden = torch.linspace(-1, 1, H).bfloat16().expand(rows, -1)
    narrow = weights[0].detach().bfloat16().requires_grad_()
    distillation_loss(narrow, alike, [Step(hidden, torch.arange(rows), 1.0)], size=16)[0].backward()

    exact = narrow.detach().double().requires_grad_()
    reference_loss(exact, alike, [Step(hidden[:1].double(), torch.arange(1), 1.0)]).backward()
    torch.testing.assert_close(narrow.grad.double(), exact.grad, rtol=2e-2, atol=2e-4)


def test_what_a_loss_compares_is_shown_to_who_watches():
    """Every loss inside, none after it, and the one who watched before watches again."""
    weights, teacher, steps = problem(pruned=True, heads=3)
    outer, inner = [], []
    with chunked.watched(lambda *seen: outer.append(seen)):
        with chunked.watched(lambda *seen: inner.append(seen)):
            distillation_loss(weights, teacher, steps, divergence("forward_kl"))
        distillation_loss(weights[0], teacher, [replace(steps[0], head=0)], divergence("forward_kl"))
    distillation_loss(weights, teacher, steps, divergence("forward_kl"))
    assert len(inner) == len(outer) == 1
    assert inner[0] == (weights, teacher, steps)
    assert len(outer[0][0]) == 1 and outer[0][0][0] is weights[0]  # a single head, as a list
