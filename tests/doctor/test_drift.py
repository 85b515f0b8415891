"""Drift that is planted: other text, another mix, other lengths, another temperature; and none."""

import copy
import json
import re
from dataclasses import replace

import pytest

from specdraft.data.prompts import Prompt
from specdraft.decoding.rules import Typical, describe
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.doctor import Level, LoadedDrafter, Serving
from specdraft.doctor.drift import check_drift, difference, find_report, sample
from specdraft.errors import UserError
from specdraft.evaluation import EvaluationSettings, evaluate
from specdraft.export.vllm import VLLM
from tests.doctor.common import QUESTIONS


@pytest.fixture(scope="module")
def loaded(target, run):
    return LoadedDrafter.load(run, target)


@pytest.fixture(scope="module")
def report(loaded, prompts, target):
    """The evaluation of the run on what it was trained for, in two categories."""
    named = [replace(each, category="even" if int(each.id) % 2 == 0 else "odd") for each in prompts]
    settings = EvaluationSettings(num_draft_tokens=3, max_new_tokens=16)
    found = evaluate(target, loaded.drafter, named, settings, progress=False)
    return json.loads(json.dumps(found.to_dict()))


def asked(category, texts):
    return [Prompt(str(i), category, ({"role": "user", "content": text},)) for i, text in enumerate(texts)]


def findings(loaded, report, prompts, serving=None):
    serving = serving or Serving()
    return check_drift(loaded, report, serving, sample(loaded, report, prompts, serving, 16))


def test_the_same_traffic_has_not_drifted(loaded, report):
    found = findings(loaded, report, asked("even", QUESTIONS[::2]) + asked("odd", QUESTIONS[1::2]))
    assert not any(finding.level is Level.FAULT for finding in found.values()), found
    assert "no difference for certain" in found["drift"].sentence


def test_the_sample_is_decoded_with_the_penalties_of_the_report(loaded, report, prompts, target):
    """Greedily in both, and yet another acceptance."""
    settings = EvaluationSettings(num_draft_tokens=3, max_new_tokens=16, temperatures=(0.0,), repetition_penalty=1.5)
    told = json.loads(json.dumps(evaluate(target, loaded.drafter, prompts, settings, progress=False).to_dict()))
    plain, penalized = (sample(loaded, each, prompts, Serving(), 16) for each in (report, told))
    assert [each.answer for each in plain] != [each.answer for each in penalized]
    assert sum(each.counts.accepted for each in penalized) == sum(told["results"][0]["accepted_per_position"])


def test_other_text_is_named_with_what_it_costs(loaded, report):
    texts = [f"{i} {word} ? ! return {word} {word} b a {i}" for i in range(6) for word in ("b", "return")]
    found = findings(loaded, report, asked("poems", texts))
    assert found["drift"].level is Level.FAULT and "worst=FILE.jsonl" in found["drift"].sentence
    assert found["drift by category"].level is Level.FAULT
    assert "100% of the rounds are of categories that the report lacks" in found["drift by category"].sentence
    assert "poems" in found["drift by category"].sentence
    assert "below the report's interval from the first draft already" in found["drift by position"].sentence


def test_requests_without_a_category_are_in_no_new_one(loaded, report):
    found = findings(loaded, report, asked("uncategorized", QUESTIONS))["drift by category"]
    assert found.level is Level.NOTE and "the report lacks" not in found.sentence
    assert "100% of the rounds are of requests that name no category" in found.sentence
    mixed = asked("uncategorized", QUESTIONS[:6]) + asked("even", QUESTIONS[6:])
    assert findings(loaded, report, mixed)["drift by category"].level is Level.NOTE
    renamed = {**report, "categories": [{**each, "category": "uncategorized"} for each in report["categories"]]}
    assert findings(loaded, renamed, asked("uncategorized", QUESTIONS))["drift by category"].level is Level.OK


def test_a_new_category_that_is_accepted_as_well_is_no_fault(loaded, report):
    found = findings(loaded, report, asked("sums", QUESTIONS))["drift by category"]
    assert found.level is Level.NOTE and "categories that the report lacks (it has even, odd): sums" in found.sentence
    assert "these differ from all of the report by" in found.sentence


def test_k_stands_beside_the_acceptance_length(loaded, report):
    assert (
        "on 2 requests (K = 3, as in the report)"
        in findings(loaded, report, asked("even", QUESTIONS[:2]))["drift"].sentence
    )
    adaptive = {**report, "settings": report["settings"] | {"num_draft_tokens": "auto"}}
    found = findings(loaded, adaptive, asked("even", QUESTIONS[:2]))["drift"].sentence
    assert "(K = 3, which the report found to pay)" in found


def test_another_mix_of_the_same_categories(loaded, report):
    hard = copy.deepcopy(report)
    for row in hard["categories"]:
        row["acceptance_length"] = 3.5 if row["category"] == "even" else 1.5
        row["acceptance_length_interval"] = [1.0, 4.0]
    found = findings(loaded, hard, asked("even", QUESTIONS[:1]) + asked("odd", QUESTIONS[1:]))
    mix = float(found["drift by category"].sentence.split("both have makes ")[1])
    assert mix < -0.4


def test_lengths_template_and_temperature(loaded, report, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    said = {"chat_template_hash": "other", "benchmark": str(tmp_path / "short.jsonl"), "prompts": 2}
    said |= {"chat_template_options": {"enable_thinking": False}}
    told = {**report, "settings": report["settings"] | said}
    found = findings(loaded, told, asked("even", QUESTIONS[:4]), Serving(temperature=0.3))
    assert "the report's other" in found["drift of the traffic"].sentence
    assert "the report's with the chat template's options {\"enable_thinking\": false}" in (
        found["drift of the traffic"].sentence
    )
    assert "prompts have" in found["drift of the traffic"].sentence
    assert "served at 0.3, in the report at 0" in found["drift of the temperature"].sentence


def test_the_interval_of_a_difference():
    value, (low, high) = difference(3.0, (2.6, 3.3), 2.0, (1.6, 2.3))
    assert (value, low, high) == pytest.approx((-1.0, -1.5, -0.5))


def test_the_report_of_an_export_lies_beside_it(report, tmp_path):
    """In the run, and only of weights that are quantized alike."""
    (tmp_path / "evaluation.json").write_text(json.dumps(report))
    for folder in ("export-vllm", "drafter", "."):
        assert find_report(tmp_path / folder, None) == report
    assert find_report(tmp_path / "export-vllm", None, "int8") is None
    named = str(tmp_path / "evaluation.json")
    assert find_report(tmp_path / "elsewhere" / "export", named, "int8") == report


def test_reports(loaded, tmp_path, prompts):
    assert find_report(tmp_path, None) is None
    alone = check_drift(loaded, None, Serving(), sample(loaded, None, prompts[:2], Serving(), 8))
    assert "no evaluation.json of these weights beside the checkpoint" in alone["drift"].sentence
    with pytest.raises(UserError, match="does not exist"):
        find_report(tmp_path, str(tmp_path / "nothing.json"))
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(UserError, match="is no evaluation"):
        find_report(tmp_path, None)


def test_the_sample_drafts_as_the_report_did(loaded, prompts, target):
    """Above temperature 0 vLLM's drafts are greedy, and accepted otherwise than sampled ones: with the draws of the
    report either count is found again."""
    settings = EvaluationSettings(num_draft_tokens=3, max_new_tokens=16, temperatures=(1.0,))
    told = evaluate(target, loaded.drafter, prompts, settings, progress=False, engine=VLLM()).to_dict()
    rows = {row["drafting"]: row | {"beside": False} for row in told["results"]}
    counts = {drafting: sum(row["accepted_per_position"]) for drafting, row in rows.items()}
    assert counts["greedy"] != counts["sampled"]
    for drafting, row in rows.items():
        now = sample(loaded, {**told, "results": [row]}, prompts, Serving(), 16)
        assert sum(each.counts.accepted for each in now) == counts[drafting]


def test_what_the_traffic_does_not_do_is_not_compared(loaded, report):
    row = report["results"][0]
    for result, settings, said in (
        ({"nodes_per_round": 9}, {}, "drafted trees"),
        ({}, {"draft_tree": f"{StaticTree.chain(3, stop=Confidence(0.5))}"}, "ended drafts where they were unsure"),
        ({}, {"grammar": "json"}, "followed a grammar"),
        ({"temperature": 1.0}, {"rule": describe(Typical())}, r"accepted by another rule \(lossy: Typical"),
    ):
        other = {**report, "results": [row | result], "settings": report["settings"] | settings}
        found = check_drift(loaded, other, Serving(), [])
        assert re.match(f"the report {said}.*: evaluate again with decoding.* to compare", found["drift"].sentence)
