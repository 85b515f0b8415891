"""D-PACE: what each step of a chain weighs, and that it is the slope of the expected number of accepted tokens."""

from dataclasses import replace

import pytest
import torch

from specdraft.drafters.confidence import weigh_by_confidence
from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from specdraft.losses.chunked import distillation_loss
from specdraft.losses.divergence import divergence
from tests.drafters.test_objective import draft

SMOOTH = {"confidence_smoothing": 0.5}


def chains(steps):
    """Of each chain its start, and for every step that it reaches the place among the step's positions."""
    places = [{int(p) - 1 - s: i for i, p in enumerate(step.positions)} for s, step in enumerate(steps)]
    for start in places[0]:
        found = []
        for place in places:
            if start not in place:
                break
            found.append(place[start])
        yield start, found


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
def test_a_step_weighs_what_its_chain_may_still_accept(smoothing):
    (head,), teacher, steps = draft()
    alphas = [result.alpha for result in distillation_loss(head.weight, teacher, steps)[1]]
    weighed = weigh_by_confidence([head.weight], teacher, steps, smoothing)
    assert all(len(s.positions) for s in steps) and len(steps[2].positions) < len(steps[0].positions)
    for _, places in chains(steps):
        smooth = [smoothing + (1 - smoothing) * float(alphas[s][place]) for s, place in enumerate(places)]
        products = torch.tensor(smooth, dtype=torch.float64).cumprod(0)
        for s, place in enumerate(places):
            assert float(weighed[s].shares[place]) == pytest.approx(float(products[s:].sum()), rel=1e-9)
    assert {step.weight for step in weighed} == {1.0} and {step.total for step in weighed} == {len(steps[0].positions)}
    assert not any(step.shares.requires_grad for step in weighed)


def test_the_weighed_log_acceptance_has_the_slope_of_the_expected_acceptances():
    """-sum w log a, with w fixed, falls as E rises, whatever is changed: here the draft's own logits."""
    (head,), teacher, steps = draft()
    weighed = weigh_by_confidence([head.weight], teacher, steps, 0.0)

    def acceptances(weight):
        found = []
        for step in steps:
            q = (step.hidden.detach() @ weight.T).softmax(-1)
            p = teacher.logits(teacher.last[step.positions]).softmax(-1)
            found.append(torch.minimum(p, q).sum(-1))
        return found

    weight = head.weight.detach().clone().requires_grad_()
    alphas = acceptances(weight)
    expected = torch.zeros(())
    for _, places in chains(steps):
        expected = expected + torch.stack([alphas[s][place] for s, place in enumerate(places)]).cumprod(0).sum()
    (rise,) = torch.autograd.grad(expected, weight)

    weight = head.weight.detach().clone().requires_grad_()
    loss = -sum((step.shares * alpha.log()).sum() for step, alpha in zip(weighed, acceptances(weight), strict=True))
    (fall,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(fall, -rise, rtol=1e-9, atol=1e-12)


def test_shares_of_documents_and_totals_of_a_larger_batch_stay():
    (head,), teacher, steps = draft()
    plain = weigh_by_confidence([head.weight], teacher, steps, 0.5)
    g = torch.Generator().manual_seed(3)
    own = torch.rand(len(steps[0].positions), generator=g, dtype=torch.float64)
    other = torch.rand(len(steps[1].positions), generator=g, dtype=torch.float64)  # a chain counts as where it starts
    given = [replace(steps[0], shares=own, total=7.0), replace(steps[1], shares=other, total=6.0), steps[2]]
    weighed = weigh_by_confidence([head.weight], teacher, given, 0.5)
    assert {step.total for step in weighed} == {7.0}
    for _, places in chains(steps):
        for s, place in enumerate(places):
            assert float(weighed[s].shares[place]) == pytest.approx(float(plain[s].shares[place] * own[places[0]]))


@pytest.mark.parametrize(("kind", "option"), [(Eagle, "ttt_steps"), (Eagle3, "ttt_steps"), (Medusa, "num_heads")])
def test_every_family_weighs_its_steps_so(kind, option, target, packed):
    torch.manual_seed(0)
    plain, other = (kind.for_target(target, **{option: 3}, **given).double() for given in ({}, SMOOTH))
    other.load_state_dict(plain.state_dict())
    features = target.features(packed.input_ids, packed.position_ids, plain.layers)
    before = plain.training_loss(packed, features, target)
    found = other.training_loss(packed, features, target)
    assert not torch.isclose(found.loss, before.loss)
    for name, value in before.metrics.items():  # what is counted is not weighed
        torch.testing.assert_close(found.metrics[name], value)
    found.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in other.parameters())
    if kind is Eagle3:  # smoothed wholly a step weighs the steps from it on, of those that its chain reaches
        sums = {name: value for name, value in found.metrics.items() if name.endswith("loss_sum")}
        whole = Eagle3(**plain.config() | {"confidence_smoothing": 1.0}).double()
        whole.load_state_dict(plain.state_dict())
        loss = whole.training_loss(packed, features, target).loss
        total = found.metrics["step_0/total"]
        assert sums["step_2/loss_sum"] / total < loss < 3 * sum(sums.values()) / total


@pytest.mark.parametrize("kind", [Eagle3, Medusa])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"confidence_smoothing": 1.5}, "expected null .* or a number from 0 to 1"),
        ({"confidence_smoothing": -0.1}, "expected null .* or a number from 0 to 1"),
        ({**SMOOTH, "sample_positions": True}, "expected sample_positions=false"),
    ],
)
def test_what_is_no_smoothing_is_refused(kind, options, sentence, target):
    with pytest.raises(UserError, match=sentence):
        kind.for_target(target, **options)


def test_a_step_without_positions_weighs_nothing():
    (head,), teacher, steps = draft()
    last = replace(steps[2], hidden=steps[2].hidden[:0], positions=steps[2].positions[:0])
    weighed = weigh_by_confidence([head.weight], teacher, [*steps[:2], last], 0.5)
    assert len(weighed[2].shares) == 0
    assert torch.isfinite(distillation_loss(head.weight, teacher, weighed, divergence("forward_kl"))[0])
