"""The sentence and the settings that follow from the speedups."""

import yaml

from specdraft.bench.advice import best_lengths, concurrencies, schedule, sentences, settings_text, vllm_settings
from specdraft.bench.engines import Contender
from specdraft.bench.summary import Objective, summarize
from tests.bench.written import CONTENDERS, FOUR, ONE, blocks, three


def results(found):
    return [summarize(found, each.name, load, Objective()) for load in (ONE, FOUR) for each in CONTENDERS]


def test_it_pays_or_not_and_how_long_drafts_are_best():
    found = results(three())
    first, second = sentences(found, CONTENDERS)
    assert (
        first
        == "At 1 request at a time drafting pays: eagle3 K=3 is 2.00 times as fast as without drafts [2.00, 2.00]."
    )
    assert second.startswith("At 4 requests at a time drafting pays: eagle3 K=1 is 1.20")
    assert best_lengths(found, CONTENDERS, "eagle3") == {1: 3, 4: 1}
    settings = vllm_settings(found, CONTENDERS, "target")
    config = settings["speculative-config"]
    assert config["num_speculative_tokens"] == 3
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 4, 1]]
    text = settings_text(settings, [first])
    assert text.startswith(f"# {first}\n") and yaml.safe_load(text) == settings


def test_where_it_does_not_pay_nothing_is_drafted():
    speeds = {"plain": {ONE: 1.0, FOUR: 1.0}, "eagle3 K=1": {ONE: 1.1, FOUR: 0.7}, "eagle3 K=3": {ONE: 1.0, FOUR: 0.5}}
    found = results(blocks(speeds))
    assert (
        "At 4 requests at a time drafting does not pay: the best, eagle3 K=1 is 0.70" in sentences(found, CONTENDERS)[1]
    )
    assert vllm_settings(found, CONTENDERS, "t")["speculative-config"]["num_speculative_tokens_per_batch_size"] == [
        [1, 1, 1],
        [2, 4, 0],
    ]
    slow = {name: dict.fromkeys((ONE, FOUR), 0.5 if name != "plain" else 1.0) for name in speeds}
    assert vllm_settings(results(blocks(slow)), CONTENDERS, "t") == {"model": "t"}


def test_at_each_concurrency_the_fastest_of_all_is_chosen():
    """Over both it is the look-up, whose K does not follow the batch size; at one request the head's long draft."""
    options = ("--speculative-config", '{"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 2}')
    lookup = Contender("ngram K=2", "ngram", 2, options)
    speeds = {"plain": (1.0, 1.0), "ngram K=2": (1.8, 1.9), "eagle3 K=1": (1.5, 1.2), "eagle3 K=3": (2.0, 0.8)}
    given = blocks({name: {ONE: one, FOUR: four} for name, (one, four) in speeds.items()})
    contenders = [*CONTENDERS, lookup]
    found = [summarize(given, each.name, load, Objective()) for load in (ONE, FOUR) for each in contenders]
    chosen = {at: vllm_settings(found, contenders, "t", at)["speculative-config"] for at in (None, 1, 4)}
    assert [each["method"] for each in chosen.values()] == ["ngram", "eagle3", "ngram"]
    assert chosen[1] == {"method": "eagle3", "num_speculative_tokens": 3}
    assert chosen[None]["num_speculative_tokens"] == 2 and concurrencies(found) == [1, 4]
    found = [each for each in found if each["contender"] != "ngram K=2" or each["load"]["value"] == 1]
    assert vllm_settings(found, contenders, "t")["speculative-config"]["method"] == "eagle3"  # the other failed at four


def test_an_interval_around_one_is_no_certainty():
    found = results(three())
    found[2]["speedup_interval"] = (0.9, 3.0)
    assert "it is not certain that drafting pays" in sentences(found, CONTENDERS)[0]
    assert sentences(found, CONTENDERS[1:]) == []


def test_tables_join_equal_neighbors():
    assert schedule({1: 5, 4: 5, 16: 0}) == [[1, 4, 5], [5, 16, 0]] and schedule({8: 3}) == [[1, 8, 3]]
