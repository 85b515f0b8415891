"""Acceptance counts against numbers worked out by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from specdraft.decoding.metrics import AcceptanceCounts, acceptance_length, acceptance_length_error


def generation(drafted, accepted):
    return SimpleNamespace(drafted=drafted, accepted=accepted)


def test_counts_by_hand():
    counts = AcceptanceCounts(3).add(generation([3, 3, 3, 3], [3, 0, 1, 1]))
    assert (counts.rounds, counts.drafted, counts.accepted) == (4, 12, 5)
    assert counts.accepted_per_position == [3, 1, 1]
    assert counts.acceptance_length == acceptance_length(5, 4) == 1 + 5 / 4
    assert counts.survival == [3 / 4, 1 / 4, 1 / 4]
    assert counts.conditional_acceptance_rate == [3 / 4, 1 / 3, 1.0]
    assert counts.draft_acceptance_rate == pytest.approx((counts.acceptance_length - 1) / 3)
    assert counts.acceptance_length == pytest.approx(1 + sum(counts.survival))


def test_short_drafts_do_not_count_as_rejections():
    # Two tokens of three drafted and both accepted: position 3 was never reached. An empty draft is a round.
    counts = AcceptanceCounts(3).add(generation([2, 0, 3], [2, 0, 2]))
    assert counts.drafted_per_position == [2, 2, 1]
    assert counts.conditional_acceptance_rate == [1.0, 1.0, 0.0]
    assert counts.survival == [2 / 3, 2 / 3, 0.0]
    assert counts.acceptance_length == 1 + 4 / 3
    assert counts.draft_acceptance_rate == 4 / 5


def test_counts_add_up():
    first, second = generation([2, 2], [1, 2]), generation([2], [0])
    together = AcceptanceCounts(2).add(first).add(second)
    assert AcceptanceCounts(2).add(first) + AcceptanceCounts(2).add(second) == together
    with pytest.raises(ValueError, match="draft lengths"):
        AcceptanceCounts(2) + AcceptanceCounts(3)


def test_without_rounds_rates_are_undefined():
    counts = AcceptanceCounts(2)
    assert math.isnan(counts.acceptance_length)
    assert math.isnan(counts.draft_acceptance_rate)
    assert all(math.isnan(rate) for rate in counts.survival + counts.conditional_acceptance_rate)


def test_to_dict_uses_the_words():
    values = AcceptanceCounts(2).add(generation([2], [1])).to_dict()
    assert values["acceptance_length"] == 2.0
    assert values["conditional_acceptance_rate"] == [1.0, 0.0]
    assert values["survival"] == [1.0, 0.0]
    assert values["draft_acceptance_rate"] == 0.5


def test_the_error_of_an_acceptance_length_over_prompts():
    generator = np.random.default_rng(0)
    rounds = generator.integers(5, 30, (400, 24))
    accepted = generator.binomial(rounds, generator.uniform(0.2, 0.8, (400, 24)))
    lengths = [acceptance_length(int(a.sum()), int(n.sum())) for a, n in zip(accepted, rounds, strict=True)]
    errors = [acceptance_length_error(list(zip(a, n, strict=True))) for a, n in zip(accepted, rounds, strict=True)]
    assert np.mean(errors) == pytest.approx(np.std(lengths), rel=0.1)
    assert acceptance_length_error([(1, 2), (2, 4), (3, 6)]) == 0
    assert math.isnan(acceptance_length_error([(1, 2)])) and math.isnan(acceptance_length_error([(0, 0), (0, 0)]))
