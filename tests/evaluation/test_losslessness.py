"""Answers that differ: a wrong rule is caught by the logit gap, a near-tie in bfloat16 is not blamed."""

import json
import math
from dataclasses import replace

import pytest
import torch

from specdraft.data.prompts import encode
from specdraft.decoding import rules
from specdraft.decoding.generation import Generation
from specdraft.decoding.passes import Pass
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.evaluation import EvaluationSettings, Prompt, evaluate, table
from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.losslessness import ALLOWED_ULPS, Difference, first_difference
from specdraft.evaluation.report.pages import html
from specdraft.evaluation.results import Request, summarize
from specdraft.targets import Target
from tests.fakes import tiny_llama

SETTINGS = EvaluationSettings(num_draft_tokens=3, temperatures=(0.0,), max_new_tokens=24)


def make_target(tokenizer, dtype):
    return Target.from_model(tiny_llama(len(tokenizer), 128, initializer_range=0.3).to(dtype), tokenizer)


def prompts(*texts):
    return [Prompt(text, "code", ({"role": "user", "content": text},), (), f"{text}:1") for text in texts]


def logits_after(target, ids):
    features = target.step(Pass.prompt(ids, target.device), target.new_cache(1, len(ids)))
    return target.logits(features.last[:, -1])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_rule_is_caught(tokenizer, dtype, monkeypatch):
    greedy = rules.greedy

    def accepts_one_too_many(trees, best):
        drafted = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool)).sum(-1)
        accepted = (greedy(trees, best).accepted + 1).minimum(drafted)
        path = torch.arange(trees.num_nodes).expand_as(trees.tokens)
        return rules.Verdict(path, accepted, best.gather(1, accepted[:, None])[:, 0])

    target = make_target(tokenizer, dtype)
    assert evaluate(target, PromptLookup(), prompts("def a", "return"), SETTINGS, progress=False).results[0].lossless
    monkeypatch.setattr(rules, "greedy", accepts_one_too_many)
    evaluation = evaluate(target, PromptLookup(), prompts("def a", "return"), SETTINGS, progress=False)
    (result,) = evaluation.results
    assert result.differences and result.lossless is False
    assert max(each.ulps for each in result.differences) > ALLOWED_ULPS[dtype]
    written = evaluation.to_dict()
    assert written["results"][0]["lossless"] is False
    assert written["results"][0]["differences"][0]["gap"] == result.differences[0].gap > 0
    assert "!!! NOT LOSSLESS" in table(evaluation) and "NOT LOSSLESS" in html(written)


def test_a_near_tie_in_bfloat16_is_said_to_be_one(tokenizer, monkeypatch):
    """Two tokens whose logits are one unit in the last place apart change places in passes over several tokens."""
    target = make_target(tokenizer, torch.bfloat16)
    (prompt,) = prompts("def a")
    ids = encode(target.tokenizer, prompt.opening)
    first, second = logits_after(target, ids).topk(2).indices.tolist()
    logits, passes = target.logits, []

    def nearly_tied(last):
        passes.append(last.shape[1] if last.dim() == 3 else 1)
        values = logits(last).clone()
        values[..., first] = 8.0 + (0.0 if passes[-1] > 1 else 0.0625)  # eps 2^-7: one unit in the last place at 8
        values[..., second] = 8.0 + (0.0625 if passes[-1] > 1 else 0.0)
        return values

    monkeypatch.setattr(target, "logits", nearly_tied)
    evaluation = evaluate(target, PromptLookup(min_ngram=1), [prompt], SETTINGS, progress=False)
    (result,) = evaluation.results
    assert max(passes) > 1 and len(result.differences) == 1 and result.lossless
    assert result.differences[0].ulps == pytest.approx(1.0) and result.differences[0].gap == 0.0625
    text = table(evaluation)
    assert "NOT LOSSLESS" not in text and "near-ties, logits up to 1.0 units in the last place of bfloat16" in text
    assert "near-ties" in html(evaluation.to_dict()) and "NOT LOSSLESS" not in html(evaluation.to_dict())


def test_the_gap_is_the_targets_own(tokenizer):
    target = make_target(tokenizer, torch.float32)
    prompt, answer = [5, 6, 7], [1, 2, 3, 4]
    assert first_difference(target, prompt, answer, answer, Sampling()) is None
    found = first_difference(target, prompt, answer, [1, 2, 9, 4], Sampling())
    own = logits_after(target, [*prompt, 1, 2]).double()
    larger = own[[3, 9]].abs().max()
    assert found.position == 2 and found.gap == pytest.approx(float((own[3] - own[9]).abs()))
    assert found.ulps == pytest.approx(found.gap / float(torch.nextafter(larger.float(), torch.tensor(1e9)) - larger))


def test_the_gap_is_that_of_penalized_logits(tokenizer):
    target = make_target(tokenizer, torch.float32)
    prompt, answer, sampling = [5, 6, 3], [9, 2, 3, 4], Sampling(repetition_penalty=1.5, presence_penalty=0.3)
    found = first_difference(target, prompt, answer, [9, 2, 9, 4], sampling)
    own, other = (
        value / 1.5 if value > 0 else value * 1.5 for value in logits_after(target, [*prompt, 9, 2])[[3, 9]].tolist()
    )
    assert found.gap == pytest.approx(abs(own - (other - 0.3)))


def test_an_answer_that_stops_early_is_no_near_tie(tokenizer):
    found = first_difference(make_target(tokenizer, torch.float32), [5], [1, 2], [1], Sampling())
    assert not found.near_tie and replace(found, near_tie=True).position == 1


def test_an_answer_that_stops_early_is_written(tmp_path):
    difference = Difference(1, math.inf, math.inf, near_tie=False)
    request = Request(0, "code", Generation([1, 2]), Generation([1]), [], difference)
    evaluation = Evaluation({}, [summarize([request], "eagle3", 0.0, 1)], [], {0.0: 1.0})
    found = json.loads(evaluation.write_json(tmp_path / "evaluation.json").read_text())["results"][0]
    assert found["lossless"] is False and found["differences"][0]["ulps"] is None
