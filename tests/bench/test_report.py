"""The table and the page."""

import re
from html import unescape

from specdraft.bench.measurement import measurement
from specdraft.bench.report import groups, html, table
from tests.bench.written import CONTENDERS, three

SETTINGS = {
    "target": "tiny",
    "benchmark": "<chat>",
    "prompts": 6,
    "max_new_tokens": 11,
    "temperature": 0.0,
    "rounds": 1,
    "engine": "vllm, float32",
    "objective": {"ttft_ms": 100.0, "tpot_ms": None},
    "price_per_hour": 2.0,
}
MEMORY = {
    "contender": "eagle3 K=1",
    "weights_bytes": 2_500_000,
    "cache_bytes_per_token": 256,
    "target_cache_bytes_per_token": 1024,
    "cache_tokens": 900,
    "cache_tokens_lost": 100,
    "tokens_of_weights": 2441,
}


def found(**options):
    return measurement(three(**options), CONTENDERS, SETTINGS, [MEMORY], ["RAPL package-0"], "a/b")


def test_the_table_says_all_that_matters():
    text = table(found(joules=60.0))
    for words in (
        "1 request at a time",
        "eagle3 K=3          17.6  2.00 [2.00, 2.00]",
        "62/74/75",
        "0 of 6",
        "of plain's",
        "0.50",
        "weights 2.5 MB, cache 256 B a token; the engine's cache holds 900 tokens, 100 fewer than plain's",
        "energy: RAPL package-0",
        "drafting pays: eagle3 K=1 is 1.20",
    ):
        assert words in text, words
    lost = found()
    lost["results"][0] |= {"failed": 1, "failures": ["nothing for 1 s"], "ttft_ms": None}
    assert "1 of 6 requests failed: nothing for 1 s" in table(lost | {"energy": [], "memory": []})


def test_the_page_has_the_same_and_curves():
    page = html(found(joules=60.0))
    text = " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)).split())
    for words in ("of <chat>", "num_speculative_tokens_per_batch_size", "2,500,000", "within 100 ms", "At 2.0 an hour"):
        assert words in text, words
    assert "<script" not in page and page.count('<svg class="chart"') == 8
    assert "Energy was not measured" in html(found() | {"energy": []})


def test_as_many_contenders_in_a_chart_as_can_be_told_apart():
    many = found()
    many["contenders"] += [{"name": f"eagle3 K={k}", "method": "eagle3"} for k in (5, 7)]
    many["contenders"] += [{"name": "ngram K=1", "method": "ngram"}]
    assert [name for name, _ in groups(many)] == ["eagle3, by concurrency"] * 2 + ["ngram, by concurrency"]
    alone = found() | {"contenders": found()["contenders"][:1]}
    assert [name for name, _ in groups(alone)] == ["plain, by concurrency"]
