"""The text table: every number in its place, and never more than 80 columns."""

from math import isfinite

import pytest

from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.losslessness import Difference
from specdraft.evaluation.report.table import table
from specdraft.evaluation.results import Request, summarize

SETTINGS = {"prompts": 4, "max_new_tokens": 64, "dtype": "bfloat16", "device": "cpu", "draft_tree": "chain of 4"}
SETTINGS |= {"rule": "rejection sampling", "engine": None}


@pytest.fixture
def measured(generation):
    """Build an evaluation from how many tokens were accepted in each round of each of four prompts."""

    def build(accepted, drafted=4, drafter="eagle3", temperature=0.0, difference=None, divergence=(), **settings):
        requests = []
        for prompt in range(4):
            answer = generation([0] * (1 + sum(accepted) + len(accepted)), [drafted] * len(accepted), accepted)
            answer.divergence += divergence
            baseline = generation([0] * 51, [], [])
            category = "a category with a long name" if prompt else "code"
            requests.append(Request(prompt, category, baseline, answer, [], None if prompt else difference))
        results = [summarize(requests, drafter, temperature, drafted)]
        if temperature:
            results.append(summarize(requests, drafter, temperature, drafted, drafting="sampled", beside=True))
        categories = [
            summarize([each for each in requests if each.category == name], drafter, temperature, drafted, name)
            for name in sorted({each.category for each in requests})
        ]
        return Evaluation(SETTINGS | settings, results, categories, {temperature: 0.915})

    return build


def lines(evaluation: Evaluation) -> list[str]:
    found = table(evaluation).splitlines()
    assert max(map(len, found)) <= 80 and all(line == line.rstrip() for line in found)
    return found


def test_the_whole_table(measured):
    assert table(measured([4, 0, 2])) == (
        """\
4 prompts, up to 64 tokens each, drafts: chain of 4, bfloat16 on cpu
intervals: 95 %, bootstrap-t over prompts

Temperature 0: without drafting 51.0 tokens/s, distinct 4-grams 92 %
drafter        acceptance length  per request        tokens/s  speedup
eagle3         3.00 [3.00, 3.00]  3.00 [3.00, 3.00]      10.0  0.20 [0.20, 0.20]

eagle3: draft acceptance rate 0.500, cost ratio c 0.000,
  modeled speedup 3.00; verifying 4.0 nodes costs 16.67 target steps
  position                         1     2     3     4
  conditional acceptance rate  0.667 1.000 0.500 1.000
  survival                     0.667 0.667 0.333 0.333

by category: eagle3
               acceptance length  per request        tokens/s  speedup
a category w…  3.00 [3.00, 3.00]  3.00 [3.00, 3.00]      10.0  0.20 [0.20, 0.20]
code           3.00               3.00                   10.0  0.20"""
    )


def test_above_temperature_0_it_says_which_drafts_and_shows_each_category_once(measured):
    found = lines(measured([4, 0, 2], temperature=0.7, engine="vllm", benchmark="own.jsonl"))
    assert found[0] == "benchmark: own.jsonl"
    assert {"greedy drafts, as vllm drafts", "for comparison, sampled drafts"} <= set(found)
    assert sum(line.startswith("eagle3, sampled: draft acceptance rate") for line in found) == 1
    assert found.count("by category: eagle3") == 1


def test_many_positions_and_long_acceptance_stay_within_80_columns(measured):
    found = lines(measured([17, 12, 3, 9], drafted=17, drafter="eagle3 2026-01-02_10-20-30"))
    assert [line.split()[1:] for line in found if line.startswith("  position")] == [
        [str(i) for i in range(start, min(start + 8, 18))] for start in (1, 9, 17)
    ]
    assert "eagle3 2026-…  11.2 [11.2, 11.2]  11.2 [11.2, 11.2]" in "\n".join(found)
    assert "0.000 0.000     -" not in "\n".join(found)
    short = lines(measured([1, 0], drafted=3))
    assert "  conditional acceptance rate  0.500 0.000     -" in short


def test_a_lossy_rule_says_so(measured):
    found = lines(
        measured([4, 0, 2], temperature=1.0, divergence=[0.1, 0.3], rule=f"lossy: Typical({'0.12345, ' * 9})")
    )
    assert found[2].startswith("above temperature 0 the rule is lossy: Typical(") and found[3].startswith("  0.12345")
    assert "  LOSSY: the first token of a round is 0.200 (total variation, mean) away" in found


@pytest.mark.parametrize("drafter", ["eagle3", "eagle3 of a run with a name as long as a line of the table"])
@pytest.mark.parametrize(("ulps", "near_tie"), [(2.0, True), (123456.0, False), (float("inf"), False)])
def test_differences_are_judged(measured, drafter, ulps, near_tie):
    text = " ".join(
        " ".join(lines(measured([4], drafter=drafter, difference=Difference(3, 0.1, ulps, near_tie)))).split()
    )
    what = f"1 of 4 answers of {drafter} differ from the target's own"
    gap = f"logits up to {ulps:.1f} units in the last place of bfloat16 apart"
    gap = gap if isfinite(ulps) else "one ends where the other goes on"
    assert (
        f"{what}: near-ties, {gap}" if near_tie else f"!!! NOT LOSSLESS: {what} !!! at temperature 0, {gap}"
    ) in text
    assert ("NOT LOSSLESS" in text) is not near_tie
