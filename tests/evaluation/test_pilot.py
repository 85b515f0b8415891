"""What is measured by a few drafts before an evaluation: lengths that pay, costs of tokens, weights of a rule."""

from dataclasses import replace

import pytest
import torch

from specdraft.decoding.pacing import Goodput
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import Learned
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.evaluation import CostSettings, evaluate
from specdraft.evaluation.report.pages import html, table
from specdraft.evaluation.search import Search
from specdraft.evaluation.speedup.step_times import StepTime, StepTimer
from tests.evaluation.conftest import SETTINGS


@pytest.fixture(autouse=True)
def seldom(monkeypatch):
    """Times are taken for less long: these tests are of what follows from them."""
    monkeypatch.setattr("specdraft.evaluation.pilot._SECONDS", 0.05)


def measured(monkeypatch, cost):
    """Two of three drafted tokens are right, and each takes ``cost`` of a plain step."""

    def times(timer):
        return {(1, shape): StepTime(cost * (shape.depth if shape else 0), 1.0) for shape in timer.decoders}

    monkeypatch.setattr(StepTimer, "typical", times)
    monkeypatch.setattr(StepTimer, "measure_for", lambda timer, seconds, least: None)
    monkeypatch.setattr("specdraft.evaluation.speedup.measure.draft_ranks", lambda *_: torch.zeros(0))
    monkeypatch.setattr("specdraft.evaluation.speedup.measure.rank_accuracies", lambda *_: [[]] * 8)
    rates = [1 + sum(0.66**i for i in range(1, k + 1)) for k in range(1, 9)]
    lengths = iter([*rates] * 2)
    monkeypatch.setattr("specdraft.evaluation.speedup.measure.replayed_acceptance_length", lambda *_: next(lengths))


@pytest.mark.parametrize(("cost", "expected"), [(0.0, 8), (0.4, 1)])
def test_as_many_draft_tokens_as_pay(target, prompts, monkeypatch, cost, expected):
    """Free drafts are worth all eight, dear ones a single one."""
    measured(monkeypatch, cost)
    torch.manual_seed(0)
    drafter = DraftModel.for_target(target, copy_layers=4)
    settings = replace(SETTINGS, num_draft_tokens="auto", temperatures=(0.0,))
    compare = {"prompt_lookup": PromptLookup()}
    evaluation = evaluate(target, drafter, prompts[:2], settings, compare, progress=False)
    ours, lookup = evaluation.results
    assert ours.counts.num_draft_tokens == expected
    assert lookup.counts.num_draft_tokens == 5  # it costs nothing
    assert evaluation.settings["num_draft_tokens"] == "auto"
    assert "chains, as long as pays" in table(evaluation)
    assert f"draft_model, K = {expected}: draft acceptance rate" in table(evaluation)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("dear", "kind"), [("nothing", "tree"), ("trees", "chain"), ("all", "chain of 1")])
def test_a_chain_or_a_tree_whichever_pays_most(target, prompts, monkeypatch, temperature, dear, kind):
    """Where nodes cost nothing a tree is accepted for longer; where they do, a chain is better."""

    def cost(shape):
        nodes, is_chain = (0, True) if shape is None else (shape.num_nodes, shape in chains)
        share = {"nothing": 0.0, "trees": 0.0 if is_chain else 2.0, "all": 2.0}[dear]
        return StepTime(0.0, 1.0 + share * nodes)

    chains = {StaticTree.chain(k, sampled) for k in range(1, 9) for sampled in (False, True)}
    monkeypatch.setattr(StepTimer, "typical", lambda timer: {(1, shape): cost(shape) for shape in timer.decoders})
    monkeypatch.setattr(StepTimer, "measure_for", lambda timer, seconds, least: None)
    torch.manual_seed(0)
    drafter = DraftModel.for_target(target, copy_layers=3)  # of four, so that it is often wrong, and near
    search = Search(num_nodes=[4, 16])
    settings = replace(SETTINGS, shape=search, temperatures=(temperature,))
    evaluation = evaluate(target, drafter, prompts[:3], settings, {"prompt_lookup": PromptLookup()}, progress=False)
    found = evaluation.settings["found_drafts"]
    about = f"draft_model, T={temperature:g}"
    assert kind in found[about]
    assert found[f"prompt_lookup, T={temperature:g}"].startswith("chain of 5")
    assert f"{about}: a few drafts promised most of a {found[about]}" in " ".join(table(evaluation).split())
    assert f"{about}: {found[about]}" in html(evaluation.to_dict())
    assert "drafts: chains or trees, whichever pays most" in " ".join(table(evaluation).split())
    assert evaluation.settings["num_draft_tokens"] == "auto"
    if kind == "tree":  # more nodes than levels, of the kind that is lossless with these drafts
        assert found[about].startswith("static tree of 16" if temperature else "dynamic tree of 16")
        result = evaluation.results[0]
        assert result.nodes_per_round > result.counts.num_draft_tokens


def test_no_tree_is_tried_for_sampled_drafts_under_a_grammar(target, prompts, monkeypatch):
    """Its ranks would be of drafts without the grammar."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr("specdraft.evaluation.pilot.accuracies", lambda *_: pytest.fail("measured"))
    torch.manual_seed(0)
    drafter = DraftModel.for_target(target, copy_layers=4)
    settings = replace(SETTINGS, shape=Search(num_nodes=[4]), temperatures=(1.0,), grammar="json", max_new_tokens=8)
    evaluation = evaluate(target, drafter, prompts[:2], settings, {}, progress=False)
    assert evaluation.settings["found_drafts"]["draft_model, T=1"].startswith("chain of ")


def test_drafts_are_as_long_as_what_was_measured_says(target, prompts, monkeypatch):
    measured(monkeypatch, 0.1)
    torch.manual_seed(0)
    drafter = DraftModel.for_target(target, copy_layers=4)
    settings = replace(SETTINGS, shape=StaticTree.chain(8, stop=Goodput()), temperatures=(0.0,))
    compare = {"prompt_lookup": PromptLookup()}
    seen = []
    monkeypatch.setattr(Goodput, "weigh", lambda stop, rounds, most: seen.append(stop.costs))
    evaluation = evaluate(target, drafter, prompts[:2], settings, compare, progress=False)
    ((name, costs),) = evaluation.settings["draft_costs"].items()  # a look-up costs nothing
    # The last one is of a draft that never pays, with which rounds without any are timed.
    assert name == "draft_model, T=0" and set(seen) == {costs, None, (1.0,)}
    assert costs == pytest.approx((0.1,) * 8)
    assert evaluation.settings["idle_costs"] == {name: pytest.approx(0.1)}
    assert (
        set(evaluation.results[0].counts.to_dict())
        and evaluation.settings["draft_tree"] == "chain of 8, as long as pays"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layers", [1, 4])
def test_drafts_end_by_what_was_learned_of_a_few(layers, temperature, target, prompts):
    """Of a draft that is hardly ever accepted nothing is drafted; the target itself, all of it, goes on to the end."""
    torch.manual_seed(0)
    drafter = DraftModel.for_target(target, copy_layers=layers)
    settings = replace(SETTINGS, shape=StaticTree.chain(6, stop=Learned(0.5)), temperatures=(temperature,))
    evaluation = evaluate(target, drafter, prompts[:3], settings, {"prompt_lookup": PromptLookup()}, progress=False)
    ((name, weights),) = evaluation.settings["stop_weights"].items()  # a look-up has no distribution
    assert name == f"draft_model, T={temperature:g}" and len(weights) == 4
    counts = evaluation.results[0].counts
    assert counts.drafted == (0 if layers == 1 else counts.rounds * 6)


def test_drafts_under_a_grammar_are_not_replayed_without_it(target, prompts, monkeypatch):
    """Their lengths are those of the run."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr("specdraft.evaluation.speedup.measure.draft_ranks", lambda *_: pytest.fail("replayed"))
    torch.manual_seed(0)
    drafter = DraftModel.for_target(target, copy_layers=4)
    settings = replace(SETTINGS, temperatures=(0.0,), grammar="json", max_new_tokens=8)
    cost = CostSettings(batch_sizes=(1,))
    evaluation = evaluate(target, drafter, prompts[:2], settings, {}, progress=False, cost=cost)
    lengths = [each.acceptance_length for each in evaluation.cost_models[0].predictions]
    assert lengths[-1] == pytest.approx(evaluation.results[0].counts.acceptance_length) and len(lengths) == 3


@pytest.mark.parametrize("shape", [StaticTree.chain(3), StaticTree.chain(3, stop=Goodput())])
def test_requests_side_by_side_are_answered_as_each_alone(target, prompts, monkeypatch, shape):
    """The same tokens, draws and counts, and the figures say of how many requests they are."""
    torch.manual_seed(0)
    drafter = DraftModel.for_target(target, copy_layers=3)
    settings = replace(SETTINGS, shape=shape, max_new_tokens=12, drafting="sampled")
    cost = CostSettings(batch_sizes=(1, 2), seconds=0.1)
    alone, together = (
        evaluate(target, drafter, prompts, replace(settings, batch_size=size), progress=False, cost=cost)
        for size in (1, 3)
    )
    for one, many in zip(alone.results, together.results, strict=True):
        assert (one.requests, one.tokens) == (many.requests, many.tokens)
        assert many.lossless in (True, None)
        if shape.stop is None:
            assert one.counts == many.counts
    assert [each["segments"] for each in alone.samples] == [each["segments"] for each in together.samples] or shape.stop
    assert together.settings["batch_size"] == 3
    assert "3 requests side by side (tokens/s are of each)" in " ".join(table(together).split())
    assert "requests side by side (tokens/s" not in table(alone)
    if shape.stop is None:
        assert {each.batch_size for each in together.cost_models[0].predictions} == {1, 2, 3}
        assert {each["batch_size"] for each in together.checks} == {3}
        assert together.advice[0].batch_size == 3 and "3 requests side by side" in together.advice[0].sentence
        assert "By length of the chain, 3 requests side by side" in html(together.to_dict())
    else:  # what drafts cost of one request, and of three
        assert all([*costs] == [1, 3] for costs in together.settings["draft_costs"].values())


def test_what_was_searched_for_is_not_called_the_longest(target, prompts, monkeypatch):
    """Longer ones were compared with it."""
    torch.manual_seed(0)
    drafter = DraftModel.for_target(target, copy_layers=4)
    cost = CostSettings((1,), (), seconds=0.1)
    told = [
        evaluate(target, drafter, prompts[:2], replace(settings, temperatures=(0.0,)), progress=False, cost=cost).advice
        for settings in (replace(SETTINGS, num_draft_tokens="auto"), replace(SETTINGS, num_draft_tokens=1))
    ]
    assert [advice.longest for (advice,) in told] == [False, True]
