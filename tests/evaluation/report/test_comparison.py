"""Drafters beside each other: names that tell them apart, evaluations that may be compared, and one page or PNGs."""

import json

import pytest
from omegaconf import OmegaConf

from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.evaluation.report.charts import write_png
from specdraft.evaluation.report.comparison import ComparisonPage, gather, names
from tests.evaluation.written import evaluation


def test_names_tell_drafters_apart():
    first, second, third = PromptLookup(), PromptLookup(), PromptLookup()
    named = names([first, second, third], ["/runs/a/drafter", "/runs/b/drafter", "/runs/c"])
    assert named == {"prompt_lookup b": second, "prompt_lookup c": third}
    with pytest.raises(UserError, match="names a drafter twice"):
        names([first, second], ["/runs/a", "/runs/a"])


def test_gathered_runs_keep_what_they_share_once():
    gathered = gather([evaluation("eagle3", "a"), evaluation("medusa", "b")])
    found = [(row["drafter"], row["temperature"]) for row in gathered["results"]]
    assert sorted(found) == [(name, t) for name in ("eagle3 a", "medusa b", "prompt_lookup") for t in (0.0, 1.0)]
    assert [model["drafter"] for model in gathered["cost_models"]] == ["eagle3 a"] * 2 + ["medusa b"] * 2
    assert [each["drafter"] for each in gathered["samples"]] == ["eagle3 a", "medusa b"]


def test_other_prompts_are_no_comparison():
    other = evaluation("medusa", "b")
    other["settings"]["prompts"] = 40
    with pytest.raises(UserError, match="differ in prompts \\(4 and 40\\)"):
        gather([evaluation(), other])


def test_a_multirun_ends_with_a_page(tmp_path):
    for number, (drafter, run) in enumerate((("eagle3", "a"), ("medusa", "b"))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "evaluation.json").write_text(json.dumps(evaluation(drafter, run)))
    ComparisonPage().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "<h1>eagle3 a, medusa b for " in page and "<no>" not in page


def test_charts_as_png(tmp_path):
    pytest.importorskip("resvg_py")
    paths = write_png(evaluation(), tmp_path)
    assert len(paths) == 11 and all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert paths[0].name == "01-by-length-of-the-chain-one-request.png" and paths[0].stat().st_size > 5000
