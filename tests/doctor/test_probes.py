"""Faults that show in what the head predicts, each planted in a sound head and found by its name."""

import json
import shutil

import pytest
import torch

from specdraft.data.prompts import Prompt, encode
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.doctor import Level, LoadedDrafter, Serving, report, run_checks
from specdraft.doctor.probes import acceptance, answer, better, compared, floor
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.vllm import VLLM
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


def test_a_hardly_trained_head_is_no_fault_of_its_settings(target, prompts, hardly_trained, tmp_path):
    """It predicts better without the norm that it was trained with, for certain and by far, but hardly anything."""
    loaded = LoadedDrafter.load(hardly_trained, target)
    answers = answer(loaded, [encode(target.tokenizer, prompt.opening) for prompt in prompts], 32)
    own = acceptance(loaded.drafter, loaded, answers)[1]
    loaded.drafter.norm_output = False
    assert better(acceptance(loaded.drafter, loaded, answers)[1], own)

    exported = export(hardly_trained, VLLM("float32"), tmp_path / "served")
    for path, said in (
        (hardly_trained, "as it was trained: it is hardly trained"),
        (exported, "a head that is hardly trained may do so; if this one is well trained, correct norm_output"),
    ):
        findings = run_checks(LoadedDrafter.load(path, target), prompts, max_new_tokens=32)
        assert not {"layers", "norm", "residual"} & faults(findings)
        assert findings["norm"].level is Level.NOTE and said in findings["norm"].sentence


def test_a_small_difference_is_no_fault():
    """As of trained heads whose neighboring layers are nearly alike."""
    own, little, much = (torch.tensor([[value, 10.0]] * 12, dtype=torch.float64) for value in (6.0, 6.5, 8.0))
    for others, level in (({"a": little}, Level.NOTE), ({"a": little, "b": much}, Level.FAULT), ({}, Level.OK)):
        finding = compared("layers=[2, 4, 6]", own, others, "the layers", known=False)
        assert finding.level is level
    assert compared("layers=[2, 4, 6]", own, {"b": much}, "the layers", known=True).level is Level.NOTE


def test_whose_settings_are_known(target, run, prompts, tmp_path):
    """A run wrote down what it trained with; what was imported says what a stranger's file said."""
    planted = tmp_path / "run"
    shutil.copytree(run, planted)
    config = json.loads((planted / "drafter" / "config.json").read_text())
    config["drafter"]["norm_output"] = True
    for extra, level in (({}, Level.NOTE), ({"imported_from": "head"}, Level.FAULT)):
        config["extra"] |= extra
        (planted / "drafter" / "config.json").write_text(json.dumps(config))
        assert run_checks(LoadedDrafter.load(planted, target), prompts, max_new_tokens=32)["norm"].level is level


def test_traffic_outside_the_draft_vocabulary_and_under_another_system_prompt(target, run):
    unlike = [Prompt(str(i), "x", ({"role": "user", "content": f"%% ~{i} @@ " * 3},)) for i in range(12)]
    system = "; ".join("print(x)" for _ in range(12))
    findings = run_checks(LoadedDrafter.load(run, target), unlike, Serving(system_prompt=system), 32)
    assert {"draft vocabulary", "system prompt"} <= set(findings)


def test_conversations_without_a_chat_template(plain, prompts, run, found):
    assert faults(found(system_prompt="be brief")) == {"prompts", "chat template"}
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
    length = f"acceptance length {1 + sum(accepted) / len(accepted):.2f}"
    assert f"{length} decoded greedily, K = 5 (these files say none), on 2 prompts" in finding.sentence


def test_better_is_a_matter_of_all_prompts():
    own = torch.tensor([[4.0, 10.0]] * 12, dtype=torch.float64)
    one, every = own.clone(), own.clone()
    one[0, 0] = 9
    every[:, 0] += 0.5
    assert not better(own, own) and not better(one, own) and better(every, own) and not better(own, every)


def test_another_epsilon_of_the_norms(found):
    findings = found({"rms_norm_eps": 1.0})
    said = findings["norm epsilon"].sentence
    assert "norm epsilon" in faults(findings) and "correct rms_norm_eps in config.json" in said
    assert found({"rms_norm_eps": 1e-5})["norm epsilon"].level is not Level.FAULT
    assert "norm epsilon" not in found()


def test_a_draft_that_is_never_accepted(found):
    """What it drafts is sure and wrong."""
    findings = found(tensors=lambda tensors: tensors["lm_head.weight"].neg_())
    assert "decoding" in faults(findings) and "was accepted, so that it costs time" in findings["decoding"].sentence


@pytest.mark.parametrize(
    ("drafted", "accepted", "level"),
    [(99, 0, None), (100, 0, Level.FAULT), (100, 1, Level.NOTE), (100, 20, Level.NOTE), (100, 21, None)],
)
def test_the_floor_of_acceptance(drafted, accepted, level):
    """A weak head that has learned which token is frequent is no fault."""
    counts = AcceptanceCounts(1, drafted, drafted, accepted, [drafted], [drafted], [accepted])
    finding = floor("acceptance length 1.00", counts, commonest=0.2)
    assert (finding and finding.level) is level
    assert finding is None or "rms_norm_eps" in finding.sentence


def test_an_honest_weak_head_is_no_fault(target, prompts, hardly_trained):
    findings = run_checks(LoadedDrafter.load(hardly_trained, target), prompts, max_new_tokens=32)
    assert not {"decoding", "weights", "norm epsilon"} & faults(findings)
