"""Reported numbers against arithmetic by hand, from generations without a model."""

import math

import pytest

from specdraft.evaluation.results import Request, distinct_ngrams, summarize


@pytest.fixture
def requests(generation):
    def baseline(tokens, seconds):
        return generation(list(range(tokens)), [], [], 0.5, seconds)

    return [
        # 9 tokens: one from the prefill, rounds of 3 + 1 + 4 tokens.
        Request(0, "code", baseline(9, 4.0), generation(list(range(9)), [3, 3, 3], [2, 0, 3], 0.5, 2.0, 0.45)),
        # 4 tokens: one from the prefill, one round of 3.
        Request(1, "chat", baseline(4, 1.5), generation([7, 8, 9, 9], [3], [2], 0.5, 1.0, 0.15)),
    ]


def test_by_hand(requests):
    result = summarize(requests, "fake", 0.0, 3)
    assert result.counts.accepted_per_position == [3, 3, 1]
    assert result.acceptance_length.value == 1 + 7 / 4
    assert result.acceptance_length_per_request.value == pytest.approx(((1 + 5 / 3) + 3) / 2)
    assert (result.prompts, result.requests, result.tokens, result.baseline_tokens) == (2, 2, 13, 13)
    assert result.tokens_per_second == pytest.approx(13 / 4.0)
    assert result.baseline_tokens_per_second == pytest.approx(13 / 6.5)
    assert result.speedup.value == pytest.approx(6.5 / 4.0)
    assert result.draft_step_seconds == pytest.approx(0.6 / (4 * 3))
    assert result.target_step_seconds == pytest.approx(5.5 / (8 + 3))
    assert result.cost_ratio == pytest.approx(0.05 / 0.5)
    assert result.verification_cost_ratio == pytest.approx((3.0 - 0.6) / 4 / 0.5)
    assert result.modeled_speedup == pytest.approx(2.75 / (1 + 3 * 0.1))
    assert result.differences == [] and result.lossless
    assert result.nodes_per_round == 3 and result.divergence is None
    for estimate in (result.acceptance_length, result.acceptance_length_per_request, result.speedup):
        assert estimate.interval[0] <= estimate.value <= estimate.interval[1]


def test_two_prompts_tell_next_to_nothing(requests):
    """Student's distribution with one degree of freedom; what cannot be is left out."""
    result = summarize(requests, "fake", 0.0, 3)
    assert result.acceptance_length.interval == (1.0, 4.0)
    low, high = result.speedup.interval
    assert low == 0.0 and high > 4
    assert all(
        interval is None or 0 <= interval[0] <= interval[1] <= 1 for interval in result.conditional_acceptance_interval
    )


def test_turns_of_one_conversation_are_one_prompt(requests, generation):
    first, second = requests
    turns = [first, Request(0, "chat", second.baseline, second.drafted)]
    result = summarize(turns, "fake", 1.0, 3)
    assert (result.prompts, result.requests) == (1, 2)
    assert result.acceptance_length_per_request.value == pytest.approx(((1 + 5 / 3) + 3) / 2)
    assert result.acceptance_length.interval is None
    assert result.differences is None and result.lossless is None


def test_nothing_to_verify(generation):
    only_end = generation([1], [], [], 0.5, 0.0, 0.0)
    result = summarize([Request(0, "a", only_end, only_end), Request(1, "a", only_end, only_end)], "fake", 0.0, 3)
    assert math.isnan(result.acceptance_length.value)
    assert result.acceptance_length.interval is None
    assert math.isnan(result.cost_ratio)
    assert result.speedup.value == 1.0
    assert result.lossless is True


def test_keys_are_the_fields_words(requests):
    values = summarize(requests, "fake", 0.0, 3, category="code").to_dict()
    for key in (
        "acceptance_length",
        "acceptance_length_interval",
        "acceptance_length_per_request",
        "conditional_acceptance_rate",
        "survival",
        "draft_acceptance_rate",
        "tokens_per_second",
        "baseline_tokens_per_second",
        "speedup",
        "speedup_interval",
        "cost_ratio",
        "modeled_speedup",
        "lossless",
        "differences",
        "drafting",
        "category",
    ):
        assert key in values
    assert values["acceptance_length"] == 1 + 7 / 4
    assert isinstance(values["acceptance_length_interval"], list)


def test_loop_and_no_loop():
    assert distinct_ngrams([list(range(128))], 4) == 1.0
    assert distinct_ngrams([[7] * 128], 4) == 1 / 125
    assert distinct_ngrams([[1, 2, 3, 4] * 32], 4) == 4 / 125


def test_pooled_within_lists_not_between_them():
    assert distinct_ngrams([[1, 2, 3, 4, 5]] * 3, 4) == 1.0
    assert distinct_ngrams([[1, 1, 1], [1, 2, 3]], 2) == (1 + 2) / 4


def test_too_short():
    assert math.isnan(distinct_ngrams([[1, 2, 3]], 4))
    assert math.isnan(distinct_ngrams([], 4))
