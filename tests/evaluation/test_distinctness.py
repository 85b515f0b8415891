"""The share of distinct n-grams."""

import math

from specdraft.evaluation.distinctness import distinct_ngrams


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
