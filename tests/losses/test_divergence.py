"""Divergences: values and gradients in closed form against autograd of the plain formulas, in fp64."""

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from specdraft.errors import UserError
from specdraft.losses.divergence import DIVERGENCES, Distribution, Draft, divergence, kind
from specdraft.losses.eager import softmax
from tests.losses import reference

C, VD = 40, 23
PAIRS = {
    "forward_kl": ("forward_kl", reference.forward_kl),
    "reverse_kl": ("reverse_kl", reference.reverse_kl),
    "jsd": ("jsd", reference.jsd(0.5)),
    "jsd 0.1": ({"name": "jsd", "beta": 0.1}, reference.jsd(0.1)),
    "total_variation": ("total_variation", reference.total_variation),
    "lk_hybrid": ("lk_hybrid", reference.lk_hybrid(3.0)),
    "lk_hybrid 10": ({"name": "lk_hybrid", "eta": 10}, reference.lk_hybrid(10)),
    "cross_entropy": ("cross_entropy", reference.cross_entropy),
    "ce_l1": ("ce_l1", reference.ce_l1(0.1)),
    "ce_l1 0.7": ({"name": "ce_l1", "share": 0.7}, reference.ce_l1(0.7)),
}


def problem(dtype=torch.float64, scale=1.5):
    """Draft logits ``[C, VD]``, the target's log p, and the target as the chunked loss gives it."""
    g = torch.Generator().manual_seed(0)
    z = (scale * torch.randn(C, VD, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    logits = (scale * torch.randn(C, VD, generator=g, dtype=torch.float64)).to(dtype)
    mass = (0.3 + 0.7 * torch.rand(C, generator=g, dtype=torch.float64)).to(dtype)
    label = torch.randint(-1, VD, (C,), generator=g)
    label[:3] = -1
    log_p = logits.log_softmax(-1)
    p_log_p = (log_p.exp() * log_p).sum(-1)
    return z, log_p, Distribution(log_p.exp(), p_log_p, mass, log_p.argmax(-1), label)


def draft_of(z, target):
    z = z.detach().clone()
    q, log_normalizer, _ = softmax(z, torch.empty_like(z))
    overlap = torch.minimum(target.mass[:, None] * target.p, q)
    return Draft(z, log_normalizer, q, overlap, overlap.sum(-1))


@pytest.mark.parametrize(("spec", "formula"), PAIRS.values(), ids=PAIRS)
def test_value_and_gradient_equal_autograd_of_the_plain_formula(spec, formula):
    z, log_p, target = problem()
    before = [field.clone() for field in target]
    values, grad_z = divergence(spec)(draft_of(z, target), target)
    expected = formula(log_p, z.log_softmax(-1), target.mass, target.label)
    (expected_grad,) = torch.autograd.grad(expected.sum(), z)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad_z, expected_grad, rtol=1e-11, atol=1e-14)
    assert all(torch.equal(field, kept) for field, kept in zip(target, before, strict=True)), "the target is shared"


def test_every_divergence_is_compared_with_a_formula():
    named = {spec if isinstance(spec, str) else spec["name"] for spec, _ in PAIRS.values()}
    assert named == set(DIVERGENCES)


@pytest.mark.parametrize(("spec", "formula"), PAIRS.values(), ids=PAIRS)
def test_fp32_stays_near_fp64_where_probabilities_underflow(spec, formula):
    z, log_p, target = problem(scale=40.0)  # p and q down to exp(-200)
    narrow = Distribution(*(field.float() if field.is_floating_point() else field for field in target))
    assert (narrow.p == 0).any() and (z.float().softmax(-1) == 0).any()
    values, grad_z = divergence(spec)(draft_of(z.float(), narrow), narrow)
    expected = formula(log_p, z.log_softmax(-1), target.mass, target.label).detach()
    if spec == "reverse_kl":  # log p ends at the smallest fp32 number, about exp(-87)
        assert torch.isfinite(values).all() and (values <= expected + 1e-3).all() and (values > 0).all()
    else:
        torch.testing.assert_close(values.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(grad_z).all()


def test_total_variation_is_what_acceptance_leaves():
    z, _, target = problem()
    draft = draft_of(z, target)
    alpha = torch.minimum(target.mass[:, None] * target.p, z.softmax(-1)).sum(-1)
    values, _ = divergence("total_variation")(draft, target)
    torch.testing.assert_close(values, 1 - alpha.detach(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "total_variation", "lk_hybrid"])
def test_a_draft_that_equals_the_target_is_left_alone(name):
    z = problem()[0]
    p, log_normalizer, best = softmax(z.detach(), torch.empty_like(z))
    p_log_p = torch.linalg.vecdot(p, z.detach()) - log_normalizer
    target = Distribution(p, p_log_p, torch.ones(C, dtype=p.dtype), best)
    values, grad_z = divergence(name)(draft_of(z, target), target)
    assert values.abs().max() < 1e-13 and grad_z.abs().max() < 1e-13


def test_cross_entropy_is_torchs():
    z, _, target = problem()
    values, grad_z = divergence("cross_entropy")(draft_of(z, target), target)
    expected = torch_cross_entropy(z, target.label, ignore_index=-1, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected.sum(), z)
    torch.testing.assert_close(values, expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad_z, expected_grad, rtol=1e-12, atol=1e-15)
    outside = target.label < 0
    assert 3 <= outside.sum() < C and (values[outside] == 0).all() and (grad_z[outside] == 0).all()


@pytest.mark.parametrize("name", ["cross_entropy", "ce_l1"])
def test_some_divergences_want_labels(name):
    z, _, target = problem()
    with pytest.raises(UserError, match=r"no true next tokens, .* choose forward_kl"):
        divergence(name)(draft_of(z, target), target._replace(label=None))


def test_the_share_of_the_hybrid_is_a_constant_to_the_gradient():
    z, log_p, target = problem()
    _, grad_z = divergence("lk_hybrid")(draft_of(z, target), target)
    _, of_kl = divergence("forward_kl")(draft_of(z, target), target)
    tv, of_tv = divergence("total_variation")(draft_of(z, target), target)
    share = torch.exp(-3 * (1 - tv))[:, None]
    torch.testing.assert_close(grad_z, share * of_kl + (1 - share) * of_tv, rtol=1e-11, atol=1e-14)

    arguments = (log_p, z.log_softmax(-1), target.mass, target.label)
    variation = reference.total_variation(*arguments)
    moving = torch.exp(-3 * (1 - variation))
    whole = moving * reference.forward_kl(*arguments) + (1 - moving) * variation
    (other,) = torch.autograd.grad(whole.sum(), z)
    assert (grad_z - other).abs().max() > 1e-3, "differentiating the share would show"


def test_the_hybrid_goes_from_kl_to_total_variation():
    z, _, target = problem()
    values = {name: divergence(name)(draft_of(z, target), target)[0] for name in ("forward_kl", "total_variation")}
    for eta, name in ((0, "forward_kl"), (1e6, "total_variation")):
        hybrid, _ = divergence({"name": "lk_hybrid", "eta": eta})(draft_of(z, target), target)
        torch.testing.assert_close(hybrid, values[name], rtol=1e-13, atol=0)


@pytest.mark.parametrize(("beta", "name"), [(1e-6, "forward_kl"), (1 - 1e-6, "reverse_kl")])
def test_jsd_lies_between_the_two_kl(beta, name):
    z, _, target = problem()
    values, grad_z = divergence({"name": "jsd", "beta": beta})(draft_of(z, target), target)
    kl, grad_kl = divergence(name)(draft_of(z, target), target)
    torch.testing.assert_close(values / min(beta, 1 - beta), kl, rtol=1e-3, atol=0)
    torch.testing.assert_close(grad_z / min(beta, 1 - beta), grad_kl, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kl", "'kl'.*forward_kl, reverse_kl, jsd, total_variation, lk_hybrid, cross_entropy"),
        (None, "None.*forward_kl"),
        ({"eta": 3}, "None.*forward_kl"),
        ({"name": "lk_hybrid", "beta": 0.5}, "no option 'beta': expected eta"),
        ({"name": "forward_kl", "eta": 3}, "no option 'eta': expected none"),
        ({"name": "lk_hybrid", "eta": -1}, "eta is -1"),
        ({"name": "jsd", "beta": 0}, "beta is 0"),
        ({"name": "jsd", "beta": 1.0}, "beta is 1.0"),
        ({"name": "jsd", "beta": "half"}, "beta is half"),
        ({"name": "ce_l1", "share": 1.5}, "share is 1.5"),
    ],
)
def test_what_there_is_not_is_refused(spec, message):
    with pytest.raises(UserError, match=message):
        divergence(spec)


def test_kernels_know_these_alone():
    assert [kind(divergence(name))[0] for name in DIVERGENCES] == list(DIVERGENCES)
    assert kind(divergence({"name": "jsd", "beta": 0.25})) == ("jsd", 0.25)
    assert kind(lambda draft, target: None) is None
