import pytest
import torch

from specdraft.training.monitoring.metrics import Counts, gradient_norm, ratios


def test_sums_are_divided_once_over_batches_and_ranks():
    counts = Counts()
    counts.add({"loss_sum": torch.tensor(6.0), "loss_total": torch.tensor(3)})
    counts.add({"loss_sum": torch.tensor(1.0), "loss_total": torch.tensor(1)})
    other = {"loss_sum": 3.0, "loss_total": 1.0, "step_1/match_sum": 1.0, "step_1/total": 4.0}
    total = counts.take(lambda ours: [ours, other])
    assert ratios(total) == {"loss": 2.0, "match_1": 0.25, "teacher_forced_acceptance_length": 1.25}
    assert counts.take(lambda ours: [ours]) == {}


def test_zero_totals_are_left_out():
    assert ratios({"loss_sum": 0.0, "loss_total": 0.0, "tokens_total": 5.0}) == {}


def test_names_of_the_steps():
    values = ratios({"step_0/loss_sum": 2.0, "step_0/alpha_sum": 1.0, "step_0/total": 2.0})
    assert values == {"loss_step_0": pytest.approx(1.0), "alpha_0": pytest.approx(0.5)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_millions_of_gradients_is_exact(dtype):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in ((2048, 2048), (64,))]
    exact = torch.cat([each.double().flatten() for each in gradients]).square().sum().sqrt().item()
    assert gradient_norm(gradients) == pytest.approx(exact, rel=1e-12)
