"""drafter=auto: the fastest on a sample, and the sample is not what it is then measured with."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from specdraft.data.prompts import Prompt
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.suffix import Suffix
from specdraft.drafters.token_recycling import TokenRecycling
from specdraft.errors import UserError
from specdraft.evaluation import selection
from specdraft.evaluation.results import Estimate
from specdraft.evaluation.selection import Choice, Selection
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.targets import Target
from tests.families import FAMILIES

CATEGORIES = ["code", "code", "chat", "code", "chat"]
PROMPTS = [Prompt(str(i), kind, ({"role": "user", "content": "x"},)) for i, kind in enumerate(CATEGORIES)]
SETTINGS = EvaluationSettings(temperatures=(0.0, 1.0))


@dataclass(frozen=True)
class Measured:
    """A result, as far as a selection reads it."""

    drafter: str
    temperature: float
    speedup: Estimate
    beside: bool = False
    requests: int = 2


@pytest.fixture
def speeds(monkeypatch):
    """Speedups by name at both temperatures, which take the place of real decoding; ``asked``: what was to be decoded,
    and by whom."""
    given = SimpleNamespace(of={}, later={}, asked=[], drafters={}, turns=[])

    def evaluate(target, drafter, prompts, settings, compare, **_):
        taking = {drafter.family: drafter, **compare}
        of = given.of | given.later if given.turns else given.of
        given.asked.append([prompt.id for prompt in prompts])
        given.turns.append(list(taking))
        given.drafters |= taking
        results = [
            Measured(name, temperature, Estimate(of.get(name, (1.0, 1.0))[number], None), requests=len(prompts))
            for number, temperature in enumerate(settings.temperatures)
            for name in taking
        ]
        slower = Measured(drafter.family, 1.0, Estimate(99.0, None), beside=True)  # as the engine does not draft
        return SimpleNamespace(results=[*results, slower])

    monkeypatch.setattr(selection, "evaluate", evaluate)
    return given


@pytest.fixture
def head():
    return Medusa.for_target(Target.from_model(FAMILIES["llama"].build()), num_heads=2)


def candidates():
    return {"suffix": Suffix(), "token_recycling": TokenRecycling()}


@pytest.mark.parametrize(
    ("of", "chosen"),
    [
        ({"medusa": (1.5, 1.2), "suffix": (2.0, 0.8)}, "medusa"),  # 1.80 over 1.60
        ({"medusa": (1.5, 1.2), "suffix": (2.0, 1.0)}, "suffix"),
        ({"suffix, else medusa": (1.6, 1.2), "suffix": (1.7, 1.1)}, "suffix, else medusa"),
        ({"token_recycling": (1.1, 1.0)}, "token_recycling"),
    ],
)
def test_the_highest_geometric_mean_of_speedups(speeds, head, of, chosen):
    speeds.of = {**of, "hybrid": of.get("suffix, else medusa")}  # what evaluations call it that it comes first in
    choice = Selection(candidates()).choose(None, {"medusa": head}, PROMPTS, SETTINGS)
    assert choice.name == chosen and choice.drafter in speeds.drafters.values()
    assert sorted(speeds.turns[0]) == ["medusa", "suffix", "suffix, else medusa", "token_recycling"]


def test_the_best_on_the_first_sample_decode_another_which_decides(speeds, head):
    speeds.of = {"suffix": (3.0, 3.0), "medusa": (2.0, 2.0), "token_recycling": (0.5, 0.5)}
    speeds.later = {"suffix": (1.2, 1.2), "medusa": (1.9, 1.9)}  # it was lucky
    choice = Selection(candidates(), prompts=1, finalists=2).choose(None, {"medusa": head}, PROMPTS, SETTINGS)
    assert speeds.turns[1] == ["suffix", "medusa"] == choice.finalists
    assert speeds.asked == [["0"], ["2"]] and [prompt.id for prompt in choice.rest] == ["1", "3", "4"]
    assert choice.name == "medusa"
    found = {(each.drafter, each.temperature): each.speedup.value for each in choice.found}
    assert found["medusa", 0.0] == 1.9 and found["suffix", 0.0] == 1.2 and found["token_recycling", 0.0] == 0.5


@pytest.mark.parametrize(
    ("prompts", "finalists", "of", "sizes"),
    [(8, 3, 100, (8, 16)), (8, 0, 100, (8, 0)), (8, 3, 20, (5, 5)), (8, 3, 40, (8, 12)), (8, 3, 2, (1, 0))],
)
def test_half_of_the_prompts_are_left_to_measure_with(prompts, finalists, of, sizes):
    first, second = Selection(candidates(), prompts, finalists)._sample_sizes(PROMPTS[:1] * of)
    assert (first, second) == sizes


def test_a_sample_of_every_category_that_is_not_decoded_again(speeds, head):
    selection = Selection(candidates(), prompts=3)
    assert selection.plan({"medusa": head}, PROMPTS) == (
        "drafter=auto: 4 drafters decode 1 prompt(s) in turns, the best 3 then 1 other(s), "
        "and the chosen one the 3 that are left"
    )
    alone = Selection(candidates(), prompts=3, finalists=0)
    assert alone.plan({"medusa": head}, PROMPTS) == (
        "drafter=auto: 4 drafters decode 2 prompt(s) in turns, and the chosen one the 3 that are left"
    )
    choice = alone.choose(None, {"medusa": head}, PROMPTS, SETTINGS)
    assert speeds.asked == [["0", "2"]]  # half at most, one of each kind first
    assert [prompt.id for prompt in choice.rest] == ["1", "3", "4"] and choice.finalists == []
    with pytest.raises(UserError, match="has 1 prompt to choose and measure with: expected at least 2"):
        Selection(candidates()).choose(None, {"medusa": head}, PROMPTS[:1], SETTINGS)


def test_a_look_up_before_a_head_has_a_memory_of_its_own(speeds, head):
    Selection(candidates()).choose(None, {"medusa": head}, PROMPTS, SETTINGS)
    both = speeds.drafters["suffix, else medusa"]
    assert isinstance(both, Hybrid) and both.head is head
    assert both.retrieval is not speeds.drafters["suffix"]


def test_without_a_head_the_look_ups_alone(speeds):
    speeds.of = {"prompt_lookup": (1.0, 0.9), "suffix": (1.1, 0.9)}
    choice = Selection({"prompt_lookup": PromptLookup(), "suffix": Suffix()}).choose(None, {}, PROMPTS, SETTINGS)
    assert choice.name == "suffix" and sorted(speeds.drafters) == ["prompt_lookup", "suffix"]
    for wrong in (
        {"candidates": {}},
        {"candidates": candidates(), "prompts": 0},
        {"candidates": candidates(), "finalists": -1},
    ):
        with pytest.raises(UserError, match="expected at least one candidate and prompt, and finalists or 0"):
            Selection(**wrong)


def test_the_summary_names_all_and_how_sure_the_choice_is():
    def found(name, *speedups):
        return [Measured(name, float(t), Estimate(*speedup)) for t, speedup in enumerate(speedups)]

    fast = found("suffix", (2.0, (1.5, 2.5)), (1.2, (1.1, 1.3)))
    near = found("prompt_lookup", (1.8, (1.4, 2.0)), (1.1, (0.9, 1.2)))
    slow = found("ngram_cache", (0.8, (0.7, 0.9)), (1.2, (1.1, 1.3)))
    every = [*slow, *near, *fast]
    said = Choice("suffix", Suffix(), every, [], PROMPTS[2:]).summary().splitlines()
    assert said[0] == "drafter=auto: speedups on 2 request(s)"
    assert [line.split()[0] for line in said[2:5]] == ["suffix", "prompt_lookup", "ngram_cache"]
    assert said[2].split(maxsplit=1)[1] == "2.00 [1.50, 2.50]   1.20 [1.10, 1.30]"
    assert said[5] == (
        "chosen: suffix, by the geometric mean of its speedups; the sample does not decide between it and prompt_lookup"
    )
    said = Choice("suffix", Suffix(), every, ["suffix", "ngram_cache"], PROMPTS[2:]).summary().splitlines()
    assert said[0] == "drafter=auto: speedups on 2 request(s), of suffix, ngram_cache on 2 other(s)"
    assert [line.split()[0] for line in said[2:5]] == ["suffix", "ngram_cache", "prompt_lookup"]  # finalists first
    assert said[5] == "chosen: suffix, by the geometric mean of its speedups"
    unsure = found("suffix", (1.1, (0.9, 1.2)), (1.0, None))
    said = Choice("suffix", Suffix(), unsure, [], PROMPTS[2:]).summary()
    assert said.endswith("by the geometric mean of its speedups; it is not certain that it pays at all")
