"""Evaluation end to end on a random target: counts, losslessness, output files."""

import json
from dataclasses import replace

import pytest
import torch

from specdraft.data.prompts import encode
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.rules import Typical
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.suffix import Suffix
from specdraft.errors import UserError
from specdraft.evaluation import evaluate, write_report
from specdraft.evaluation.report.pages import html, table
from specdraft.evaluation.speedup.model import CostSettings
from specdraft.export.transformers import Transformers
from specdraft.export.vllm import VLLM
from tests.evaluation.conftest import SETTINGS


@pytest.fixture(scope="module")
def evaluation(target, prompts):
    return evaluate(
        target, PromptLookup(), prompts, SETTINGS, {"short": PromptLookup(max_ngram=1)}, {"benchmark": "b.jsonl"}, False
    )


def test_rows_and_their_counts(evaluation, target, prompts):
    assert [(row.drafter, row.temperature) for row in evaluation.results] == [
        ("prompt_lookup", 0.0),
        ("short", 0.0),
        ("prompt_lookup", 1.0),
        ("short", 1.0),
    ]
    # The greedy counts are those of the decoder itself, on single-turn prompts decoded by hand.
    decoder = Decoder(target, PromptLookup(), 3)
    counts = AcceptanceCounts(3)
    for prompt in prompts[:2]:
        counts.add(decoder.generate(encode(target.tokenizer, prompt.opening), 24))
    by_category = {(row.drafter, row.temperature, row.category): row for row in evaluation.categories}
    assert len(by_category) == 2 * 2 * 2
    assert by_category["prompt_lookup", 0.0, "code"].counts == counts
    assert counts.accepted > 0  # a random greedy model loops, and prompt lookup finds that
    for row in evaluation.results:
        parts = [by_category[row.drafter, row.temperature, category] for category in ("code", "chat")]
        assert row.counts == parts[0].counts + parts[1].counts
        assert (row.prompts, row.requests) == (4, 5)
        assert row.tokens_per_second > 0 and row.cost_ratio > 0 and row.verification_cost_ratio > 0


def test_greedy_tokens_are_the_targets_own(evaluation):
    for row in evaluation.results:
        assert row.lossless is (True if row.temperature == 0 else None)


def test_every_way_decodes_the_same_conversation(target, prompts, monkeypatch):
    asked = []
    generate = Decoder.generate_batch

    def spy(self, texts, max_new_tokens, batch_size, seeds):
        (result,) = generate(self, texts, max_new_tokens, batch_size, seeds)
        asked.append((self.drafter is None, tuple(texts[0]), seeds, max_new_tokens, result.tokens))
        return [result]

    monkeypatch.setattr(Decoder, "generate_batch", spy)
    settings = replace(SETTINGS, temperatures=(1.0,))
    evaluate(target, PromptLookup(), prompts[2:], settings, progress=False)
    pairs = [asked[i : i + 2] for i in range(0, len(asked), 2)]
    assert [pair[0][0] for pair in pairs] == [True, False, True]  # the first place rotates
    for one, other in pairs:
        assert one[1:3] == other[1:3]  # same token ids, same seed
    baseline = next(call for call in pairs[0] if call[0])
    second_turn = target.tokenizer.decode(pairs[1][0][1])
    assert target.tokenizer.decode(baseline[4], skip_special_tokens=True) in second_turn
    assert second_turn.endswith("<|user|>\nand then?<|end|>\n<|assistant|>\n")


def test_json_and_report(evaluation, tmp_path):
    written = json.loads(evaluation.write_json(tmp_path / "evaluation.json").read_text())
    assert set(written) == {
        "created",
        "settings",
        "machine",
        "versions",
        "baseline",
        "roofline",
        "results",
        "categories",
        "cost_models",
        "checks",
        "advice",
        "samples",
    }
    settings = written["settings"]
    assert settings["num_draft_tokens"] == 3 and settings["temperatures"] == [0.0, 1.0] and settings["prompts"] == 4
    assert settings["dtype"] == "float32" and settings["device"] == "cpu" and settings["benchmark"] == "b.jsonl"
    assert settings["target"]["name"] == "in-memory" and len(settings["chat_template_hash"]) == 16
    assert written["versions"]["torch"] == torch.__version__ and written["machine"]["cores"] >= 1
    first = written["results"][0]
    assert first["acceptance_length"] == evaluation.results[0].acceptance_length.value
    assert len(first["conditional_acceptance_rate"]) == len(first["survival"]) == 3
    assert first["acceptance_length"] == pytest.approx(1 + sum(first["survival"]))
    assert [row["temperature"] for row in written["baseline"]] == [0.0, 1.0]
    assert 0 < written["baseline"][0]["distinct_4gram"] <= written["baseline"][1]["distinct_4gram"] <= 1

    page = write_report(evaluation, tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == page.count("</svg>") == 8
    assert "http" not in page and "<script" not in page and "prefers-color-scheme: dark" in page
    assert f"{evaluation.results[0].acceptance_length.value:.2f}" in page
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["evaluation.json", "report.html"]


def test_names_from_a_file_cannot_break_the_page(target, prompts, tmp_path):
    hostile = [replace(prompt, category=f"<b>{prompt.category}&") for prompt in prompts]
    evaluation = evaluate(target, PromptLookup(), hostile, replace(SETTINGS, temperatures=(0.0,)), progress=False)
    page = write_report(evaluation, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;code&amp;" in page and "<b>code" not in page


def test_table_fits_80_columns(evaluation):
    lines = table(evaluation).splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in (
        "acceptance length",
        "per request",
        "conditional acceptance rate",
        "survival",
        "draft acceptance rate",
        "speedup",
        "cost ratio c",
        "distinct 4-grams",
        "its weights and arithmetic at least",
        "by category: short",
    ):
        assert words in text
    row = evaluation.results[0]
    assert f"{row.acceptance_length.value:.2f} [{row.acceptance_length.interval[0]:.2f}" in text


def test_the_table_names_its_prompts(target, prompts):
    settings = replace(SETTINGS, temperatures=(0.0,))
    evaluation = evaluate(target, PromptLookup(), prompts[:2], settings, {}, {"benchmark": "own.jsonl"}, progress=False)
    assert table(evaluation).startswith("benchmark: own.jsonl\n2 prompts, ")


def test_one_prompt_has_no_intervals(target, prompts, tmp_path):
    evaluation = evaluate(target, PromptLookup(), prompts[:1], SETTINGS, progress=False)
    assert evaluation.results[0].speedup.interval is None and evaluation.categories == []
    assert json.loads(json.dumps(evaluation.to_dict()))["results"][0]["speedup_interval"] is None
    assert "NOT LOSSLESS" not in table(evaluation)
    write_report(evaluation, tmp_path / "report.html")


def test_bad_input_is_found_before_decoding(target, prompts, monkeypatch):
    monkeypatch.setattr(Decoder, "generate", lambda *_: pytest.fail("decoded"))
    long = replace(prompts[0], opening=({"role": "user", "content": "x y " * 200},))
    with pytest.raises(UserError, match="1 of 2 prompts do not fit the target's context of 128 tokens"):
        evaluate(target, PromptLookup(), [prompts[0], long], SETTINGS)
    with pytest.raises(UserError, match="no prompts"):
        evaluate(target, PromptLookup(), [], SETTINGS)


def test_a_tree_and_a_measured_shape(target, prompts):
    asked = []

    def measured(drafter, measured_with):
        asked.append((drafter, measured_with))
        return StaticTree(((0,), (1,), (0, 0)))

    drafter = PromptLookup()
    settings = replace(SETTINGS, shape=measured)
    evaluation = evaluate(target, drafter, prompts, settings, progress=False)
    assert asked == [(drafter, target)]
    assert evaluation.settings["draft_tree"] == "static tree of 3" and evaluation.settings["num_draft_tokens"] == 2
    assert all(result.counts.num_draft_tokens == 2 for result in evaluation.results)
    assert evaluation.results[0].lossless


def test_a_lossy_rule_says_so_and_by_how_much(target, prompts):
    settings = replace(SETTINGS, rule=Typical(0.001, 0.001))
    evaluation = evaluate(target, PromptLookup(), prompts, settings, progress=False)
    greedy, sampled = evaluation.results
    assert greedy.divergence is None and 0 < sampled.divergence < 1
    assert evaluation.settings["rule"].startswith("lossy: Typical")
    text, page = table(evaluation), html(evaluation.to_dict())
    assert "LOSSY" in text and f"{sampled.divergence:.3f}" in text
    assert "lossy: Typical" in page and f"{sampled.divergence:.3f}" in page
    exact = evaluate(target, PromptLookup(), prompts, SETTINGS, progress=False)
    assert "lossy" not in (table(exact) + html(exact.to_dict())).lower()


@pytest.fixture(scope="module")
def for_vllm(target, prompts):
    torch.manual_seed(0)
    drafter = Medusa.for_target(target, num_heads=3)
    compare = {"prompt_lookup": PromptLookup()}
    cost = CostSettings((1,), (), 0.01)
    return evaluate(target, drafter, prompts, SETTINGS, compare, progress=False, cost=cost, engine=VLLM())


def test_an_evaluation_for_an_engine_drafts_as_it_does(for_vllm):
    """The other way stands beside it, of what has a distribution to sample from."""
    found = [(row.label, row.temperature, row.drafting) for row in for_vllm.results]
    assert found == [
        ("medusa", 0.0, "greedy"),
        ("prompt_lookup", 0.0, "greedy"),
        ("medusa", 1.0, "greedy"),
        ("prompt_lookup", 1.0, "greedy"),
        ("medusa, sampled", 1.0, "sampled"),
    ]
    assert [row.beside for row in for_vllm.results] == [False] * 4 + [True]
    assert for_vllm.settings["drafting"] == "greedy" and for_vllm.settings["engine"] == "vllm"
    assert all(not row.beside for row in for_vllm.categories) and len(for_vllm.categories) == 8
    assert all(advice.drafting == "greedy" for advice in for_vllm.advice)


def test_table_and_page_say_which_drafts_a_number_is_of(for_vllm, target, prompts):
    text = table(for_vllm)
    assert max(map(len, text.splitlines())) <= 80
    assert "greedy drafts, as vllm drafts" in text and "for comparison, sampled drafts" in text
    page = html(for_vllm.to_dict())
    assert "medusa · greedy drafts" in page and "medusa, sampled" in page
    sampled = evaluate(target, PromptLookup(), prompts, SETTINGS, progress=False, engine=Transformers())
    assert sampled.settings["drafting"] == "sampled"
    explicit = replace(SETTINGS, drafting="sampled", temperatures=(1.0,))
    drafter = Medusa.for_target(target, num_heads=3)
    unlike = evaluate(target, drafter, prompts, explicit, progress=False, engine=VLLM())
    (only,) = unlike.results
    assert only.drafting == "sampled" and not only.beside
    for said in (table(unlike), html(unlike.to_dict())):
        assert "sampled drafts" in said and "as vllm drafts" not in said


def test_categories_of_one_request_are_counted_once_for_all_drafters(target, prompts):
    alone = [replace(prompt, category=f"kind {number}") for number, prompt in enumerate(prompts[:2])]
    settings = replace(SETTINGS, temperatures=(0.0,), max_new_tokens=4)
    found = evaluate(target, PromptLookup(), alone, settings, {"suffix": Suffix()}, progress=False)
    assert table(found).count("2 categories of one request only: see the report") == 1


def test_a_share_of_nothing_is_a_dash(target, prompts):
    settings = replace(SETTINGS, temperatures=(0.0,), max_new_tokens=2, num_draft_tokens=1)
    nothing = PromptLookup(min_ngram=64, max_ngram=64)
    said = table(evaluate(target, nothing, prompts[:1], settings, progress=False))
    assert "draft acceptance rate -, cost ratio" in said and "distinct 4-grams - %" in said and "nan" not in said
