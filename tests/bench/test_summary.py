"""Latencies, ratios, intervals, goodput, acceptance, energy and money of known answers."""

import pytest

from specdraft.bench.summary import Objective, by_category, energy_ratio, summarize
from specdraft.bench.turns import Block
from specdraft.errors import UserError
from tests.bench.written import FOUR, ONE, answer, three


def test_ratios_to_plain_and_their_intervals():
    found = summarize(three(joules=60.0), "eagle3 K=3", ONE, Objective(), price_per_hour=3.6)
    assert found["speedup"] == pytest.approx(2.0) and found["speedup_interval"] == pytest.approx((2.0, 2.0))
    assert found["tokens"] == 66 and found["tokens_per_second"] == pytest.approx(66 / 3.75)
    assert found["dollars_per_million_tokens"] == pytest.approx(1e-3 / (66 / 3.75) * 1e6)
    assert found["joules_per_token"] == pytest.approx(30 / 66) and found["joules_ratio"] == pytest.approx(0.5)
    assert found["acceptance_length"] == pytest.approx(1.5) and found["accepted_per_position"] == [20.0, 10.0]
    assert found["compared"] == 6 and found["different"] == 0
    plain = summarize(three(), "plain", ONE, Objective())
    assert plain["speedup"] == 1 and plain["acceptance_length"] is None and plain["accepted_per_position"] == []
    assert plain["joules_per_token"] is None and plain["joules_ratio"] is None
    assert plain["dollars_per_million_tokens"] is None


def test_latencies_are_of_every_answer():
    found = summarize(three(), "plain", ONE, Objective())  # answers of 1.0 to 1.5 s
    assert found["ttft_ms"]["p50"] == pytest.approx(125) and found["ttft_ms"]["p99"] == pytest.approx(149.5)
    assert found["tpot_ms"]["p50"] == pytest.approx(1250 * 0.9 / 10)
    assert found["answer_ms"]["mean"] == pytest.approx(1250) and found["gap_ms"]["p95"] == pytest.approx(1475 * 0.9)


def test_goodput_counts_what_met_both_objectives_and_no_failure():
    blocks = three()
    found = summarize(blocks, "plain", ONE, Objective(ttft_ms=135.0, tpot_ms=111.0))
    assert found["met"] == pytest.approx(3 / 6) and found["goodput"] == pytest.approx(3 / 7.5)
    blocks[0].answers[0].error = "status 503"
    found = summarize(blocks, "plain", ONE, Objective(ttft_ms=135.0))
    assert found["met"] == pytest.approx(3 / 6) and found["failed"] == 1 and found["failures"] == ["status 503"]


def test_failures_count_on_neither_side():
    blocks = three()
    blocks[2].answers[1].error = "ended early"  # of eagle3 K=1 at one request
    found = summarize(blocks, "eagle3 K=1", ONE, Objective())
    assert found["requests"] == 6 and found["tokens"] == 55 and found["compared"] == 5
    assert found["speedup"] == pytest.approx(1.5)


def test_nothing_whole_gives_no_figure():
    lost = [Block(name, ONE, [answer(0, 1.0, error="no")], 1.0) for name in ("plain", "head")]
    found = summarize(lost, "head", ONE, Objective())
    assert found["speedup"] is None and found["ttft_ms"] is None and found["met"] == 0
    assert energy_ratio(lost[:1], lost[1:]) == (None, None)


def test_answers_unlike_plains_are_counted():
    blocks = three()
    blocks[5].answers[3].ids[-1] = 99  # of eagle3 K=3 at four requests
    assert summarize(blocks, "eagle3 K=3", FOUR, Objective())["different"] == 1


def test_categories_and_settings():
    assert {name: pytest.approx(2.0) for name in "ab"} == {
        name: speed for name, (speed, _) in by_category(three(), "eagle3 K=3", ONE).items()
    }
    with pytest.raises(UserError, match=r"objective\.ttft_ms=0"):
        Objective(0)
