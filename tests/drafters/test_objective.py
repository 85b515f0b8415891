"""The objective that trained drafters share: heads lend their weights, prefixes are counted jointly."""

import pytest
import torch
from torch import nn

from specdraft.drafters.objective import DraftHead, call_with_weights, objective
from specdraft.losses.chunked import Step, Teacher
from specdraft.losses.divergence import divergence
from tests.losses.counting import HostReads
from tests.losses.reference import lk_hybrid, reference_loss

V, H, R = 7, 4, 80


def draft(heads: int = 1):
    """Heads, a teacher, and three steps that lose rows on the way; few tokens, so that many are right by chance."""
    g = torch.Generator().manual_seed(0)
    modules = [DraftHead(H, V, bias=False, dtype=torch.float64) for _ in range(heads)]
    for module in modules:
        nn.init.normal_(module.weight, generator=g)
    projection = torch.randn(V, H, generator=g, dtype=torch.float64)
    last = torch.randn(R, H, generator=g, dtype=torch.float64)
    steps, rows = [], torch.arange(R - 4)
    for step in range(3):
        rows = rows[torch.rand(len(rows), generator=g) < 0.9]
        near = last[rows + 1 + step] @ projection.T @ torch.linalg.pinv(modules[step % heads].weight.detach()).T
        noisy = near + 0.7 * torch.randn(len(rows), H, generator=g, dtype=torch.float64)
        steps.append(Step(noisy.requires_grad_(), rows + 1 + step, 0.8**step, step % heads))
    return modules, Teacher(last, lambda hidden: hidden @ projection.T, None), steps


@pytest.mark.parametrize("heads", [1, 3])
def test_a_match_counts_only_behind_matches(heads):
    modules, teacher, steps = draft(heads)
    weights = [module.weight for module in modules]
    metrics = objective(weights, teacher, steps, divergence("forward_kl")).metrics
    right = dict.fromkeys(range(R), True)
    for index, step in enumerate(steps):
        best = teacher.logits(teacher.last[step.positions]).argmax(-1)
        hits = (step.hidden @ weights[step.head].T).argmax(-1) == best
        rows = (step.positions - 1 - index).tolist()
        right = {row: right[row] and hit for row, hit in zip(rows, hits.tolist(), strict=True)}
        assert 0 < sum(right.values()) < len(rows)
        assert index == 0 or sum(right.values()) < hits.sum()
        assert metrics[f"step_{index}/match_sum"] == sum(right.values())
        assert metrics[f"step_{index}/total"] == len(rows)


def test_the_loss_is_the_weighted_mean_of_what_is_counted():
    (head,), teacher, steps = draft()
    loss, metrics, _ = objective([head.weight], teacher, steps, divergence({"name": "lk_hybrid", "eta": 10}))
    total = sum(s.weight * metrics[f"step_{i}/loss_sum"] / metrics[f"step_{i}/total"] for i, s in enumerate(steps))
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, reference_loss(head.weight, teacher, steps, lk_hybrid(10)), rtol=1e-12, atol=0)
    assert not any(value.requires_grad for value in metrics.values())


def test_the_host_reads_once():
    (head,), teacher, steps = draft()
    with HostReads() as reads:
        objective([head.weight], teacher, steps, divergence("forward_kl"))
    assert reads.seen == ["tolist"]


def test_heads_lend_all_their_weights_at_once_and_only_while_they_are_called():
    modules, teacher, steps = draft(heads=3)
    there: set[nn.Module] = set()
    for module in modules:  # as ZeRO-3 gathers and releases partitioned weights
        module.register_forward_pre_hook(lambda module, _: there.add(module))
        module.register_forward_hook(lambda module, *_: there.discard(module))

    def use(weights):
        assert there == set(modules)
        assert all(weight is module.weight for weight, module in zip(weights, modules, strict=True))
        return objective(weights, teacher, steps, divergence("forward_kl"))

    call_with_weights(modules, use).loss.backward()
    assert not there
    assert all(module.weight.grad.abs().max() > 0 for module in modules)


def test_every_lending_head_returns_the_loss():
    """A wrapper that follows tensors through a module's output, as ZeRO-3 does before backward, finds the loss."""
    modules, teacher, steps = draft(heads=2)
    returned = []
    for module in modules:
        module.register_forward_hook(lambda module, given, output: returned.append(output))
    result = call_with_weights(modules, lambda weights: objective(weights, teacher, steps, divergence("forward_kl")))
    assert len(returned) == 2 and all(isinstance(output, tuple) and output[0] is result.loss for output in returned)


def test_a_head_still_projects():
    (head,), teacher, _ = draft()
    assert torch.equal(head(teacher.last), nn.functional.linear(teacher.last, head.weight))
