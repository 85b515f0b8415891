"""Speeds of answers whose counts and seconds are known."""

import math

import pytest

from specdraft.chat.speed import Speed


def test_an_answer(answered):
    # 20 tokens in 1 s beside 10 plain rounds in 1 s; the first token comes from the prompt's pass.
    speed = Speed.of([answered(21, 1.0, [3, 2, 3, 0], plain=(10, 1.0))])
    assert speed == Speed(True, 3.0, 20.0, 10.0, 2.0)


def test_answers_count_by_their_tokens(answered):
    slow = answered(41, 4.0, [0] * 40, plain=(8, 0.8))  # 10 tokens/s as without drafting
    fast = answered(11, 0.25, [3, 3, 1], plain=(8, 0.8))  # 40 tokens/s
    speed = Speed.of([slow, fast])
    assert speed.acceptance_length == pytest.approx(1 + 7 / 43)
    assert speed.tokens_per_second == pytest.approx(50 / 4.25)
    assert speed.plain_tokens_per_second == pytest.approx(10)
    assert speed.speedup == pytest.approx(5 / 4.25)


def test_an_answer_without_a_measurement_says_nothing_of_the_speedup(answered):
    measured = answered(21, 1.0, [3] * 5, plain=(10, 1.0))
    without = answered(21, 9.0, [3] * 5)
    assert Speed.of([measured, without]).speedup == 2.0
    assert math.isnan(Speed.of([without]).speedup)
    few = answered(21, 1.0, [3] * 5, plain=(3, 0.3))  # a stall in one of them would be all that one sees
    assert math.isnan(Speed.of([few]).speedup) and Speed.of([few, few]).speedup == pytest.approx(2.0)
    assert Speed.of([without]).tokens_per_second == pytest.approx(20 / 9)


def test_a_plain_answer_and_one_token(answered):
    plain = Speed.of([answered(11, 2.0)])
    assert (plain.drafted, plain.tokens_per_second) == (False, 5.0) and math.isnan(plain.acceptance_length)
    assert math.isnan(Speed.of([answered(1, 0.0)]).tokens_per_second)
