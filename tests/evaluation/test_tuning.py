"""A changed target: who may decode beside it, how far it is, and that every report says so."""

import json
from dataclasses import asdict

import pytest
import torch

from specdraft.data.prompts import encode
from specdraft.decoding.decoder import Decoder
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.jacobi import Jacobi
from specdraft.drafters.jacobi_forcing import JacobiForcing
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.evaluation import evaluate, write_report
from specdraft.evaluation.report.pages import table
from specdraft.evaluation.tuning import Answers, about, tuned_target
from tests.drafters.jacobi_forcing.conftest import trained
from tests.evaluation.conftest import SETTINGS


@pytest.fixture(scope="module")
def drafter(target) -> JacobiForcing:
    return trained(target)


@pytest.fixture(scope="module")
def evaluation(target, drafter, prompts):
    compare = {"prompt_lookup": PromptLookup(), "jacobi": Jacobi()}
    return evaluate(target, drafter, prompts, SETTINGS, compare, {"checkpoint": "runs/a"}, progress=False)


def test_the_tuned_model_decodes_and_is_what_drafts_are_lossless_to(evaluation, target, drafter, prompts):
    assert [each.drafter for each in evaluation.at(0.0)] == ["jacobi_forcing", "prompt_lookup", "jacobi"]
    assert all(each.lossless for each in evaluation.at(0.0))
    tuned = drafter.tuned(target)
    asked = encode(target.tokenizer, prompts[0].opening)
    own, before = (Decoder(each).generate(asked, 24).tokens for each in (tuned, target))
    assert own != before, "adapters as large as these change what is said"
    said = "".join(each["text"] for each in evaluation.samples[0]["segments"] if each["status"] != "rejected")
    assert said == target.tokenizer.decode(own)


def test_every_report_says_so(evaluation, tmp_path):
    settings = json.loads(evaluation.write_json(tmp_path / "evaluation.json").read_text())["settings"]
    assert settings["target"]["name"] == "in-memory, tuned"
    assert settings["tuning"]["by"] == "runs/a" and 0 < settings["tuning"]["greedy_agreement"] < 1
    line = about(settings)
    assert line is not None and line.startswith("in-memory, tuned by runs/a: it says ")
    printed = " ".join(table(evaluation).split())
    assert f"target: {line}" in printed
    page = write_report(evaluation, tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"The target was changed: {line}. Answers are those of the tuned model." in page


def test_nothing_is_said_of_a_target_that_was_not_changed(target, prompts, tmp_path):
    evaluation = evaluate(target, PromptLookup(), prompts[:1], SETTINGS, progress=False)
    assert "tuning" not in evaluation.settings and "target:" not in table(evaluation)
    assert "The target was changed" not in write_report(evaluation, tmp_path / "report.html").read_text(
        encoding="utf-8"
    )


def test_the_distance_is_measured_on_the_targets_own_answers(target, drafter, prompts):
    asked = [encode(target.tokenizer, prompt.opening) for prompt in prompts]
    answers = Answers(target, asked, 20)
    tuned = drafter.tuned(target)
    found = answers.distance(tuned)
    agreed, divergence, tokens = 0, 0.0, 0
    for prompt in asked:
        answer = Decoder(target).generate(prompt, 20).tokens
        for place, token in enumerate(answer):
            ids = torch.tensor([prompt + answer[:place]])
            p, q = (model.model(ids).logits[0, -1].double().softmax(-1) for model in (target, tuned))
            assert p.argmax() == token
            agreed += int(q.argmax() == token)
            divergence += float((p * (p.log() - q.log())).sum())
            tokens += 1
    assert (found.tokens, found.greedy_agreement) == (tokens, pytest.approx(agreed / tokens))
    assert found.divergence == pytest.approx(divergence / tokens, rel=1e-4)
    assert asdict(answers.distance(target)) == {"greedy_agreement": 1.0, "divergence": 0.0, "tokens": tokens}


def test_who_may_stand_beside_a_drafter_that_changes_the_target(target, drafter):
    assert tuned_target(target, Medusa.for_target(target), [PromptLookup()]) is target
    assert tuned_target(target, drafter, [PromptLookup(), Jacobi()]) is not target
    with pytest.raises(UserError, match="jacobi_forcing changes the target that medusa was trained for"):
        tuned_target(target, drafter, [Medusa.for_target(target)])
    for first, others in ((PromptLookup(), [drafter]), (Hybrid(drafter, PromptLookup()), [])):
        with pytest.raises(UserError, match="changes the target that other drafters draft for: expected it alone"):
            tuned_target(target, first, others)
