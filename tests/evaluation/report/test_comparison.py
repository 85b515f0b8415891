"""Drafters beside each other: names that tell them apart, evaluations that may be compared, and one page."""

import json

import pytest
from omegaconf import OmegaConf

from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.evaluation.report.comparison import ComparisonPage, gather, names
from tests.evaluation.written import evaluation


def test_names_tell_drafters_apart():
    first, second, third = PromptLookup(), PromptLookup(), PromptLookup()
    named = names([first, second, third], ["/runs/a/drafter", "/runs/b/drafter", "/runs/c"])
    assert named == {"prompt_lookup b": second, "prompt_lookup c": third}
    alike = names([first, second, third], ["/sweeps/a/0/drafter", "/sweeps/b/0", "/sweeps/c/0"])
    assert alike == {"prompt_lookup b/0": second, "prompt_lookup c/0": third}
    with pytest.raises(UserError, match="names a drafter twice"):
        names([first, second], ["/runs/a", "/runs/a"])


def test_gathered_runs_keep_what_they_share_once():
    gathered = gather([evaluation("eagle3", "a"), evaluation("medusa", "b")])
    found = [(row["drafter"], row["temperature"]) for row in gathered["results"]]
    assert sorted(found) == [(name, t) for name in ("eagle3 a", "medusa b", "prompt_lookup") for t in (0.0, 1.0)]
    assert [model["drafter"] for model in gathered["cost_models"]] == ["eagle3 a"] * 2 + ["medusa b"] * 2
    assert [each["drafter"] for each in gathered["samples"]] == ["eagle3 a", "medusa b"]
    assert gathered["settings"]["compared"] == ["/runs/b/drafter"]


def test_drafters_of_one_checkpoint_are_told_apart_by_what_they_are_made_of():
    runs = [evaluation("eagle3", "a") for _ in range(3)]
    runs[1]["settings"]["quantization"], runs[2]["settings"]["retrieval"] = "int8", "suffix"
    called = {row["drafter"] for row in gather(runs)["results"]}
    assert called == {"eagle3 a", "eagle3 a int8", "eagle3 a suffix", "prompt_lookup"}
    with pytest.raises(UserError, match="2 evaluations are of eagle3 a, decoded alike"):
        gather([evaluation("eagle3", "a"), evaluation("eagle3", "a")])


def test_a_label_keeps_what_it_says_of_drafting():
    runs = [evaluation("eagle3", "a"), evaluation("eagle3", "b")]
    for run in runs:
        run["results"].append(run["results"][2] | {"label": "eagle3, sampled", "beside": True})
    labels = [row["label"] for row in gather(runs)["results"]]
    assert labels.count("eagle3 a, sampled") == labels.count("eagle3 b, sampled") == 1 and "eagle3" not in labels


def test_other_prompts_are_no_comparison():
    other = evaluation("medusa", "b")
    other["settings"]["prompts"] = 40
    with pytest.raises(UserError, match="differ in prompts \\(4 and 40\\)"):
        gather([evaluation(), other])


@pytest.mark.parametrize(("key", "value"), [("chat_template_options", {"thinking": True}), ("mask_drafts", False)])
def test_another_rendering_or_mask_is_no_comparison(key, value):
    other, usual = evaluation("medusa", "b"), {"chat_template_options": {}, "mask_drafts": None}
    other["settings"][key] = usual[key]  # and the other one is from before it was written
    gather([evaluation(), other])
    other["settings"][key] = value
    with pytest.raises(UserError, match=f"differ in {key}"):
        gather([evaluation(), other])


def test_other_sampling_is_no_comparison():
    other = evaluation("medusa", "b")
    neutral = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral["said"] = "temperature"
    other["settings"]["sampling"] = {"0": neutral, "1": neutral}  # and the other one is from before it was written
    gather([evaluation(), other])
    other["settings"]["sampling"]["1"] = neutral | {"repetition_penalty": 1.1}
    with pytest.raises(UserError, match=r"differ in sampling .*'temperature 1, repetition_penalty 1\.1'"):
        gather([evaluation(), other])


def test_a_multirun_ends_with_a_page(tmp_path):
    for number, (drafter, run) in enumerate((("eagle3", "a"), ("medusa", "b"))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "evaluation.json").write_text(json.dumps(evaluation(drafter, run)))
    ComparisonPage().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "<h1>eagle3 a, medusa b for " in page and "<no>" not in page


def test_a_sweep_that_cannot_be_compared_ends_with_a_sentence(tmp_path, capsys):
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        run = evaluation("eagle3", "a")
        run["settings"]["draft_tree"] = f"chain of {number + 2}"
        (tmp_path / str(number) / "evaluation.json").write_text(json.dumps(run))
    ComparisonPage().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    assert capsys.readouterr().out.startswith("comparison: none, as evaluations differ in draft_tree (chain of 2 and")
    assert not (tmp_path / "comparison.html").exists()
