"""The cost model against arithmetic by hand, its limits, and one drafter measured and predicted for real."""

import math
from types import SimpleNamespace

import pytest
import torch

from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from specdraft.evaluation.results import Estimate
from specdraft.evaluation.speedup.advice import advise
from specdraft.evaluation.speedup.model import CostSettings, chain_acceptance_length, measured_lengths, predict
from specdraft.evaluation.speedup.step_times import StepTime, StepTimer
from specdraft.export.sglang import SGLang
from specdraft.targets import Target
from tests.fakes import tiny_llama

CHAINS = {k: StaticTree.chain(k) for k in (1, 2, 3, 4, 5)}


def test_one_rate_for_all_positions_is_leviathans_equation_1():
    for alpha in (0.1, 0.5, 0.9):
        for k in (1, 4, 7):
            expected = (1 - alpha ** (k + 1)) / (1 - alpha)
            assert chain_acceptance_length([alpha] * k) == pytest.approx(expected)
    assert chain_acceptance_length([0.5, 0.0, 0.9]) == 1.5


def test_free_verification_is_leviathans_theorem_3_8():
    alpha, c, step = 0.8, 0.05, 0.02
    times = {(1, None): StepTime(0.0, step)}
    times |= {(1, CHAINS[k]): StepTime(k * c * step, step) for k in (1, 3, 5)}  # 2 and 4 are interpolated
    model = predict("head", 0.0, times, [chain_acceptance_length([alpha] * k) for k in range(1, 6)], {})
    assert [row.tokens for row in model.predictions] == [1, 2, 3, 4, 5]
    for row in model.predictions:
        k = row.tokens
        assert row.speedup == pytest.approx((1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1)))


@pytest.fixture
def model():
    """K = 2 is best alone; from four requests on verification costs too much. A tree beside the chains."""
    tree = DynamicTree(3, 2, 8)
    times = {}
    for batch_size, slower in ((1, 1.0), (2, 1.2), (4, 3.0), (8, 4.0)):
        times[batch_size, None] = StepTime(0.0, 1.0)
        for k, cost in ((1, 1.2), (2, 1.4), (3, 2.2)):
            times[batch_size, CHAINS[k]] = StepTime(0.1 * k, cost * slower - 0.1 * k)
        times[batch_size, tree] = StepTime(0.5, 2.0)
    return predict("eagle3", 0.0, times, [1.5, 2.1, 2.3], {tree: 3.0})


def test_best_setting_and_where_drafting_loses(model):
    assert model.best(1).tokens == 2 and model.best(1).speedup == pytest.approx(2.1 / 1.4)
    assert model.best(1, "tree").speedup == pytest.approx(3.0 / 2.5)
    assert model.best(4).speedup < 1 < model.best(2).speedup
    assert model.loses_from() == 4 and model.loses_from("tree") is None
    written = model.to_dict()
    assert written["best_num_draft_tokens"]["1"] == 2 and written["loses_from_batch_size"] == 4
    assert len(written["predictions"]) == 4 * 4


def test_advice_says_what_the_model_says(model):
    advice = advise([model], "eagle3", "greedy")
    assert "draft_sample_method" not in advice.vllm
    assert '"num_speculative_tokens": 2' in advice.vllm and '"method": "eagle3"' in advice.vllm
    assert (advice.gains_up_to, advice.loses_from, advice.longest) == (2, 4, False)
    assert advice.sentence == (
        "Draft 2 tokens a round with eagle3 and expect to decode 1.50 times as fast at temperature 0; turn it off from "
        "4 requests side by side, where no chain gains."
    )
    warm = predict("eagle3", 1.0, {(1, None): StepTime(0.0, 1.0), (1, CHAINS[2]): StepTime(0.2, 1.8)}, [1.3, 1.5], {})
    assert advise([model, warm], "eagle3", "greedy").sentence == (
        "Draft 2 tokens a round with eagle3 and expect to decode 1.50 times as fast at temperature 0 and 0.75 times as "
        "fast at temperature 1 with greedy drafts; turn it off from 4 requests side by side, where no chain gains. At "
        "temperature 1 it loses: do not draft there."
    )
    assert advise([model], "hydra").vllm is None  # vLLM serves no Hydra
    assert '"draft_sample_method": "probabilistic"' in advise([model], "eagle3", "sampled").vllm
    assert advise([model], "medusa", "sampled").vllm is None  # vLLM samples no Medusa heads
    assert advise([model], "eagle3", "greedy", SGLang()).vllm is None


def test_advice_names_a_tree_that_pays_more():
    """Where it was decoded with, and gains more than the best chain."""
    tree = DynamicTree(3, 2, 8)
    times = {(1, None): StepTime(0.0, 1.0), (1, CHAINS[1]): StepTime(0.1, 1.0), (1, tree): StepTime(0.5, 1.0)}
    better = predict("eagle3", 0.0, times, [1.5], {tree: 3.0})
    advice = advise([better], "eagle3", "greedy", shape=tree)
    assert advice.tree == {"depth": 3, "top_k": 2, "num_nodes": 8, "speedup": pytest.approx(2.0)}
    assert advice.num_speculative_tokens == 1  # of a chain, which every engine takes
    assert advice.sentence.endswith(
        " A tree of 8 nodes, 3 levels of at most 2 each, is expected to decode 2.00 times as fast, where the engine "
        "verifies trees."
    )
    worse = predict("eagle3", 0.0, times, [1.5], {tree: 2.0})
    assert advise([worse], "eagle3", "greedy", shape=tree).tree is None
    assert advise([better], "eagle3", "greedy", shape=CHAINS[1]).tree is None
    assert advise([better], "eagle3", "greedy", shape=DynamicTree(4, 2, 8)).tree is None  # of which nothing is known


def measured(temperature, low, high, beside=False, nodes=2.0, depth=2):
    return SimpleNamespace(
        temperature=temperature,
        speedup=Estimate(1.25, None if low is None else (low, high)),
        beside=beside,
        nodes_per_round=nodes,
        counts=AcceptanceCounts(depth),
    )


def test_advice_names_what_the_prompts_leave_open(model):
    results = [measured(0.0, 0.42, 1.82), measured(0.6, 1.1, 1.4), measured(0.8, None, None)]
    advice = advise([model], "eagle3", "greedy", None, [*results, measured(1.0, 0.4, 1.8, beside=True)])
    assert advice.undecided == {"0": "1.25 [0.42, 1.82]"} and not advice.otherwise
    assert advice.sentence.endswith(
        "no chain gains. These prompts do not decide whether it pays: whole answers measured 1.25 [0.42, 1.82] at "
        "temperature 0."
    )


def test_advice_names_what_was_measured_otherwise_than_expected(model):
    def otherwise(result):
        return advise([model], "eagle3", "greedy", None, [result]).otherwise

    advice = advise([model], "eagle3", "greedy", None, [measured(0.0, 1.1, 1.4, nodes=1.9)])  # 1.50 is expected
    assert advice.otherwise == {"0": "1.25 [1.10, 1.40]"}
    assert advice.sentence.endswith(
        "no chain gains. Whole answers so drafted measured 1.25 [1.10, 1.40] at temperature 0, prompts included: trust "
        "that figure."
    )
    assert not otherwise(measured(0.0, 1.1, 1.6)), "what was expected is inside"
    assert not otherwise(measured(0.0, 1.1, 1.4, nodes=3.0, depth=3)), "other chains were decoded"
    assert not otherwise(measured(0.0, 1.1, 1.4, nodes=6.0)), "a tree was decoded"
    assert not otherwise(measured(0.0, 1.1, 1.4, nodes=math.nan)), "nothing was drafted"
    assert not otherwise(measured(0.6, 1.1, 1.4)), "of that temperature nothing is expected"


def test_advice_against_drafting():
    times = {(1, None): StepTime(0.0, 1.0), (1, CHAINS[1]): StepTime(1.0, 1.0)}
    advice = advise([predict("head", 0.0, times, [1.5], {})], "eagle3")
    assert advice.num_speculative_tokens is None and advice.vllm is None and advice.loses_from == 1
    assert advice.sentence.startswith("Do not draft with head here") and "0.75 times" in advice.sentence


def test_step_times_of_every_cell():
    torch.manual_seed(0)
    target = Target.from_model(tiny_llama(context=64))
    drafter = Medusa.for_target(target, num_heads=3)
    shapes = [StaticTree.chain(k) for k in measured_lengths(3)] + [StaticTree(((0,), (1,), (0, 0)))]
    timer = StepTimer(target, drafter, [1, 2, 3, 4, 5], shapes, (1, 2))
    assert timer.times() == {}
    timer.measure_for(0.0)
    times = timer.times()
    assert set(times) == {(size, shape) for size in (1, 2) for shape in (None, *shapes)}
    assert all(time.verify > 0 for time in times.values())
    assert all((time.draft > 0) == (shape is not None) for (_, shape), time in times.items())


def test_an_interruption_of_one_pass_is_in_the_mean_and_not_in_what_is_typical(monkeypatch):
    target = Target.from_model(tiny_llama(context=64))
    found = {None: iter([(9, 0.0, 9.0), (4, 0.0, 4.0), (4, 0.0, 8.0), (2, 0.0, 2.0)])}
    found[CHAINS[1]] = iter([(9, 9.0, 9.0), (4, 4.0, 6.0), (2, 60.0, 2.0), (4, 2.0, 6.0)])
    monkeypatch.setattr(StepTimer, "_time", lambda timer, batch_size, shape: next(found[shape]))
    timer = StepTimer(target, Medusa.for_target(target, num_heads=1), [1, 2, 3], [CHAINS[1]], (1,))  # one pass each
    assert timer.typical() == {}
    timer.measure_for(0.0, 3)
    assert timer.typical() == {(1, None): StepTime(0.0, 1.0), (1, CHAINS[1]): StepTime(1.0, 1.5)}
    assert timer.times() == {(1, None): StepTime(0.0, 1.4), (1, CHAINS[1]): StepTime(6.6, 1.4)}
    assert timer.times()[1, CHAINS[1]].whole == pytest.approx(8.0)
    found[None], found[CHAINS[1]] = iter([(0, 0.0, 0.0)]), iter([(0, 0.0, 0.0)])
    timer.measure_for(0.0)  # again, though passes are there: a text that ended at once
    assert timer.typical()[1, CHAINS[1]] == StepTime(1.0, 1.5) and timer.times()[1, None] == StepTime(0.0, 1.4)


@pytest.mark.parametrize("sizes", [{"batch_sizes": (0,)}, {"tree_sizes": (4, "many")}])
def test_bad_sizes(sizes):
    with pytest.raises(UserError, match="expected whole numbers of at least 1"):
        CostSettings(**sizes)
    assert CostSettings(batch_sizes=(8, 2)).batch_sizes == (1, 2, 8)
