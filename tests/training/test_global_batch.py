"""The parts of a global batch add up to it: gradients of uneven parts, divided by the whole's rows."""

from types import SimpleNamespace

import pytest
import torch

from specdraft.data.datamodule import DataModule
from specdraft.data.sampler import ResumableSampler
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.training.global_batch import step_totals
from tests.training.ranks_worker import FAMILIES, Batch, make_model, make_rows


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(make_model().double(), name="random")


def part(rows: Batch, first: int, last: int) -> Batch:
    return Batch(*(value[first:last] for value in vars(rows).values()))


DISTILLED = ("eagle3", "eagle3-weighed", "eagle1", "medusa", "medusa-weighed", "p_eagle", "dflash", "dspark", "domino")
DISTILLED += ("redrafter", "kangaroo")


@pytest.mark.parametrize("family", [*DISTILLED, "draft", "pard", "jacobi_forcing"])
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
            rows = [sampler.step_indices(step * accumulate) for sampler in samplers]
            assert sorted(row for mine in rows for row in mine) == sorted(order[8 * step : 8 * step + 8])
            for sampler, mine in zip(samplers, rows, strict=True):
                assert list(sampler)[step * 8 // ranks : (step + 1) * 8 // ranks] == mine


def test_rows_for_less_than_a_step_are_one_sentence():
    with pytest.raises(UserError, match=r"packs into 7 sequences, one step takes 8 .*2 batches accumulated"):
        ResumableSampler(7, 2, world_size=2, accumulate=2)


class Dealt(DataModule):
    """The rows of a step, as the sampler would deal them to this rank."""

    def __init__(self, rows: Batch) -> None:
        self.rows_of_step = rows

    def step_batch(self, batch_idx: int) -> Batch:
        assert batch_idx == 6
        return self.rows_of_step


def trainer_with(data, world_size: int = 1, accumulate: int = 1, others: float = 0.0):
    """A trainer of ``world_size`` ranks, whose other ranks have ``others`` rows to learn at each step."""

    def reduce(rows: torch.Tensor, reduce_op: str) -> torch.Tensor:
        assert world_size > 1, "alone there is nobody to ask"
        assert reduce_op == "sum" and rows.dtype == torch.float64
        return rows + others

    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=reduce)
    return SimpleNamespace(
        datamodule=data, strategy=strategy, world_size=world_size, accumulate_grad_batches=accumulate
    )


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (1, 5), (2, 1), (2, 5), (3, 5)])
def test_totals_are_the_rows_of_all_ranks_over_the_batches_of_all_ranks(world_size, accumulate, target):
    drafter = FAMILIES["eagle3"](target)
    rows = make_rows()
    first = part(rows, 0, len(rows.input_ids) // accumulate)
    others = 0.0 if world_size == 1 else 30.0
    totals = step_totals(trainer_with(Dealt(rows), world_size, accumulate, others), drafter, first, 6)
    counts = drafter.count_supervised(rows).tolist()
    assert len(set(counts)) > 1
    assert totals == pytest.approx([(count + others) / (world_size * accumulate) for count in counts])


def test_totals_are_unknown_without_our_data_or_without_counts(target, monkeypatch):
    drafter, rows = FAMILIES["eagle3"](target), make_rows()
    assert step_totals(trainer_with(SimpleNamespace()), drafter, rows, 6) is None
    monkeypatch.setattr(drafter, "count_supervised", lambda rows: None)
    assert step_totals(trainer_with(Dealt(rows)), drafter, rows, 6) is None


def test_a_batch_that_the_sampler_did_not_deal_is_an_error(target):
    rows = make_rows()
    with pytest.raises(RuntimeError, match="batch 6 of the epoch is not where the sampler has it"):
        step_totals(trainer_with(Dealt(rows)), FAMILIES["eagle3"](target), part(rows, 1, 3), 6)
