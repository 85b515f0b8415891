"""Faults that show in what the head predicts, each planted in a sound head and found by its name."""

import pytest
import torch

from specdraft.data.prompts import Prompt
from specdraft.decoding.decoder import Decoder
from specdraft.doctor import Level, LoadedDrafter, Serving, report, run_checks
from specdraft.doctor.probes import better
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.doctor.common import LAYERS, VOCAB, faults


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_off_by_one(found, shift):
    layers = [k + shift for k in LAYERS]
    planted = {
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in layers], "use_aux_hidden_state": True},
    }
    findings = found(planted)
    assert "layers" in faults(findings) and f"with layers={list(LAYERS)} the head" in findings["layers"].sentence


@pytest.mark.parametrize(("option", "check"), [("norm_output", "norm"), ("norm_before_residual", "residual")])
def test_wrong_norm(found, option, check):
    findings = found({option: True})
    assert check in faults(findings) and f"with {option}=False the head" in findings[check].sentence
    assert faults(findings) <= {check, "norm"}


def test_traffic_outside_the_draft_vocabulary_and_under_another_system_prompt(target, run):
    unlike = [Prompt(str(i), "x", ({"role": "user", "content": f"%% ~{i} @@ " * 3},)) for i in range(12)]
    system = "; ".join("print(x)" for _ in range(12))
    findings = run_checks(LoadedDrafter.load(run, target), unlike, Serving(system_prompt=system), 32)
    assert {"draft vocabulary", "system prompt"} <= set(findings)


def test_conversations_without_a_chat_template(plain, prompts, run, found):
    assert faults(found(system_prompt="be brief")) == {"prompts"}
    chat = [Prompt("0", "chat", ({"role": "system", "content": "be brief"}, *prompts[0].opening))]
    assert "prompts" in faults(run_checks(LoadedDrafter.load(run, plain), chat))


def test_prompts_that_leave_no_room(target, prompts, run):
    with pytest.raises(UserError, match="none of the 12 prompts leaves room for 256 tokens"):
        run_checks(LoadedDrafter.load(run, target), prompts, max_new_tokens=256)


def test_a_target_that_says_too_little(target, prompts, run, monkeypatch):
    monkeypatch.setattr(Target, "eos_token_ids", frozenset(range(VOCAB)))
    findings = run_checks(LoadedDrafter.load(run, target), prompts, Serving(system_prompt="be brief"), 32)
    text = " ".join(report(findings).split())
    assert "answers" in findings and "too short to judge by, 12 tokens to 12 prompts" in text
    assert "nan" not in text and "0 fault(s)" in text
    assert not {"layers", "norm", "rounding", "system prompt", "draft vocabulary"} & set(findings)
    lookup = run_checks(LoadedDrafter(PromptLookup(), target), prompts, max_new_tokens=32)
    assert "nothing was drafted" in lookup["decoding"].sentence


def test_predictions_that_are_not_finite(target, prompts, run):
    loaded = LoadedDrafter.load(run, target)
    with torch.no_grad():
        loaded.drafter.fc.weight[0, 0] = torch.nan
    findings = run_checks(loaded, prompts, max_new_tokens=32)
    assert "answers" in faults(findings) and " nan " not in report(findings)


def test_the_acceptance_length_is_that_of_decoding(target, prompts, run):
    loaded = LoadedDrafter(PromptLookup(), target)
    loaded.drafter.bind(target)
    finding = run_checks(loaded, prompts[:2], max_new_tokens=32)["decoding"]
    ids = [
        target.tokenizer.apply_chat_template(list(p.opening), add_generation_prompt=True)["input_ids"] for p in prompts
    ]
    generations = Decoder(target, PromptLookup(), 5).generate_batch(ids[:2], 32, 8)
    accepted = [number for generation in generations for number in generation.accepted]
    assert finding.level is Level.NOTE
    assert f"acceptance length {1 + sum(accepted) / len(accepted):.2f} decoded greedily, K = 5" in finding.sentence


def test_better_is_a_matter_of_all_prompts():
    own = torch.tensor([[4.0, 10.0]] * 12, dtype=torch.float64)
    one, every = own.clone(), own.clone()
    one[0, 0] = 9
    every[:, 0] += 0.5
    assert not better(own, own) and not better(one, own) and better(every, own) and not better(own, every)
