"""The benchmark's own parts: contenders that should agree do, and turns are taken fairly."""

import pytest
import torch

from common import alternate, median_ratio
from contenders import ours, reference
from contenders.problem import DRAWS, LEAST_SHARE, SHARE_DECAY, STEP_DECAY, Shape, make_problem
from specdraft.drafters.alignment import StepDecay, align
from specdraft.targets.batch import Batch
from tests.drafters.counting import CountedFlops
from train_step import Products, comparable, contenders_of, step_flops

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_kv_heads": 1,
    "vocab_size": 60,
    "draft_vocab_size": 40,
    "tokens": 24,
    "steps": 4,
}


@pytest.mark.parametrize("first_supervised", [0, 9])
def test_ours_equals_the_plain_reference_over_optimizer_steps(first_supervised):
    problem = make_problem(Shape(**SMALL, first_supervised=first_supervised))
    contenders = [module.build(problem) for module in (ours, reference)]
    losses = torch.tensor([[contender.step(problem) for _ in range(3)] for contender in contenders])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    assert losses[0, 2] < losses[0, 0]


@pytest.mark.parametrize("first_supervised", [0, 9])
def test_positions_are_drawn_as_a_drafter_draws_them(first_supervised):
    shape = Shape(**SMALL, family="p_eagle", first_supervised=first_supervised)
    problem = make_problem(shape)
    everywhere, *later = problem.drawn()
    followed = range(max(0, first_supervised - 1), 22)  # by two tokens to learn, the last two have none
    assert everywhere.nonzero()[:, 0].tolist() == list(followed)
    assert all((one <= other).all() for one, other in zip(later, [everywhere, *later], strict=False))
    decay = StepDecay(SHARE_DECAY, sampled=True, floor=LEAST_SHARE)
    assert [rows.nonzero()[:, 0].tolist() for rows in problem.drawn()] == aligned(problem, shape.steps, decay)


def test_blocks_are_drawn_as_dflash_draws_them():
    problem = make_problem(Shape(**SMALL, family="dflash", block_size=4, anchors=8))
    decay = StepDecay(STEP_DECAY, kept=problem.kept)
    assert [rows.nonzero()[:, 0].tolist() for rows in problem.drawn()] == aligned(problem, 3, decay)


def aligned(problem, steps, decay):
    ids = torch.zeros_like(problem.input_ids)
    batch = Batch(problem.input_ids[None], torch.arange(len(ids))[None], ids[None], problem.loss_mask[None])
    torch.manual_seed(DRAWS)
    return [rows.tolist() for rows in align(batch, steps, decay).supervised]


@pytest.mark.parametrize(("family", "layers"), [("p_eagle", 2), ("dflash", 2)])
def test_ours_learns_in_every_family(family, layers):
    contender = ours.build(problem := make_problem(Shape(**SMALL, family=family, num_layers=layers, anchors=12)))
    losses = [contender.step(problem) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_losses_are_compared_where_definitions_agree():
    assert comparable("reference", "eagle3", 9) and comparable("speculators", "eagle3", 0)
    assert not comparable("speculators", "eagle3", 9) and not comparable("ours-sampled", "eagle3", 0)
    assert comparable("speculators", "dflash", 9) and comparable("speculators-frozen_head", "p_eagle", 9)
    assert list(contenders_of("dflash", "peer", reference=True).items())[1:] == [("speculators", "peer")]


def test_rewinding_gives_the_first_loss_again():
    problem = make_problem(Shape(**SMALL))
    contender = reference.build(problem)
    first = contender.step(problem)
    contender.step(problem)
    contender.rewind()
    assert contender.step(problem) == first


def test_contenders_take_turns_and_ratios_are_within_a_round():
    order = []
    measured = alternate({name: lambda name=name: order.append(name) or float(len(order)) for name in "AB"}, rounds=3)
    assert "".join(order) == "ABABAB"
    assert measured == {"A": [1.0, 3.0, 5.0], "B": [2.0, 4.0, 6.0]}
    assert median_ratio([2.0, 4.0, 90.0], [1.0, 2.0, 3.0]) == 2.0


def test_arithmetic_is_that_of_a_step():
    shape = Shape(**SMALL)
    contender = ours.build(make_problem(shape))
    with CountedFlops() as flops:
        contender.step(make_problem(shape))
    counted = sum(flops.count[name] for name in ("mm", "addmm", "addmm_", "_linear_pointwise"))
    assert step_flops(shape) == pytest.approx(counted, rel=0.1)


def test_the_rate_of_products_is_positive():
    assert Products(Shape(**SMALL), rows=8).rate() > 0
