"""The parts of a global batch add up to it: gradients of uneven parts, divided by the whole's rows."""

import pytest
import torch

from specdraft.data.sampler import ResumableSampler
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.training.ranks_worker import FAMILIES, Batch, make_model, make_rows


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(make_model().double(), name="random")


def part(rows: Batch, first: int, last: int) -> Batch:
    return Batch(*(value[first:last] for value in vars(rows).values()))


@pytest.mark.parametrize("family", ["eagle3", "eagle1", "medusa", "draft"])
def test_uneven_parts_add_up_to_the_gradient_of_the_whole(family, target):
    torch.manual_seed(0)
    drafter = FAMILIES[family](target).double()
    rows = make_rows()

    def loss(batch: Batch, *totals):
        return drafter.training_loss(batch, batch.features(target, drafter.layers), target, *totals).loss

    def gradient(value):
        trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        return torch.autograd.grad(value, trained)

    whole = loss(rows)
    totals = drafter.count_supervised(rows).double().tolist()
    parts = [part(rows, *ends) for ends in ((0, 2), (2, 3), (3, 10))]  # the second has nothing to learn
    assert drafter.count_supervised(parts[1]).sum() == 0
    losses = [loss(each, totals) for each in parts]
    torch.testing.assert_close(sum(losses), whole)
    for together, alone in zip(zip(*map(gradient, losses), strict=True), gradient(whole), strict=True):
        torch.testing.assert_close(sum(together), alone, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss(rows, totals), whole)


def test_a_step_takes_the_same_rows_however_it_is_cut():
    whole = ResumableSampler(19, 8)
    order = list(whole)
    assert len(order) == len(whole) == 16
    for ranks, accumulate in ((1, 4), (2, 2), (4, 2), (8, 1)):
        size = 8 // (ranks * accumulate)
        samplers = [ResumableSampler(19, size, 0, rank, ranks, accumulate) for rank in range(ranks)]
        assert all(len(list(sampler)) == len(sampler) == 16 // ranks for sampler in samplers)
        for step in range(2):
            rows = [sampler.step_rows(step * accumulate) for sampler in samplers]
            assert sorted(row for mine in rows for row in mine) == sorted(order[8 * step : 8 * step + 8])
            for sampler, mine in zip(samplers, rows, strict=True):
                assert list(sampler)[step * 8 // ranks : (step + 1) * 8 // ranks] == mine


def test_rows_for_less_than_a_step_are_one_sentence():
    with pytest.raises(UserError, match=r"packs into 7 rows, one step takes 8 .*2 batches accumulated"):
        ResumableSampler(7, 2, world_size=2, accumulate=2)
