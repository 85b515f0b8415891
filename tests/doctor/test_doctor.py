"""Each usual reason for low acceptance, planted in a head that is well otherwise, is found by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.data.packing import pack
from specdraft.data.sources.prompts import Prompt, encode
from specdraft.data.tokenization.chat import Example
from specdraft.decoding.decoder import Decoder
from specdraft.doctor import Level, LoadedDrafter, Serving, report, run_checks
from specdraft.drafters.checkpoint import about_target, save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target

VOCAB, LAYERS = 320, (2, 4, 6)
QUESTIONS = [f"def add_{i}(a, b): return a + b + {i}" for i in range(12)]


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = train_tokenizer(QUESTIONS, VOCAB, 256)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(4)  # sure of what it says: what to say must be read from its hidden states
    return Target.from_model(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [Prompt(str(i), "code", ({"role": "user", "content": text},)) for i, text in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def run(target, prompts, tmp_path_factory) -> Path:
    """A head that has learnt the target's answers, as a run leaves it."""
    ids = [encode(target.tokenizer, prompt.opening) for prompt in prompts]
    said = [generation.tokens for generation in Decoder(target).generate_batch(ids, 32, batch_size=8)]
    pairs = zip(ids, said, strict=True)
    rows, _ = pack([Example([*p, *r], [False] * len(p) + [True] * len(r)) for p, r in pairs], 128)
    counts = torch.bincount(torch.tensor([token for answer in said for token in answer]), minlength=VOCAB)
    vocabulary = counts.argsort(descending=True)[:200].sort().values
    torch.manual_seed(0)
    head = Eagle3.for_target(target, vocabulary, layers=LAYERS, ttt_steps=2)
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    with torch.no_grad():
        features = target.features(rows.input_ids, rows.position_ids, LAYERS)
    for _ in range(200):
        optimizer.zero_grad()
        head.training_loss(rows, features, target).loss.backward()
        optimizer.step()
    extra = {
        "data": {"sequence_length": 128, "train_coverage": 1.0},
        "decoding": {"num_draft_tokens": 3},
        "target": about_target(target),
    }
    folder = tmp_path_factory.mktemp("trained")
    save_drafter(head, folder / "drafter", target.identity, extra)
    return folder


@pytest.fixture
def found(target, prompts, run, tmp_path) -> Callable[..., dict[str, Level]]:
    """found(config, tensors, serving...) -> level by check, of an export into which ``config``'s keys were planted and
    whose tensors were edited by ``tensors``."""

    def look(config: dict[str, Any] | None = None, tensors: Callable | None = None, **serving: Any) -> dict[str, Level]:
        folder = tmp_path / "served"
        shutil.rmtree(folder, ignore_errors=True)
        export(run, VLLM("float32"), folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | (config or {})))
        if tensors is not None:
            edited = load_file(folder / "model.safetensors")
            tensors(edited)
            save_file(edited, folder / "model.safetensors")
        findings = run_checks(LoadedDrafter.load(folder, target), prompts, Serving(**serving), 32)
        return {finding.check: finding.level for finding in findings}

    return look


def faults(levels: dict[str, Level]) -> set[str]:
    return {check for check, level in levels.items() if level is Level.FAULT}


def test_a_healthy_head(target, prompts, run, found):
    findings = run_checks(LoadedDrafter.load(run, target), prompts, max_new_tokens=32)
    text = report(findings)
    assert faults({finding.check: finding.level for finding in findings}) == set(), text
    assert "0 fault(s)" in text and "these very weights" in text
    levels = found()
    assert faults(levels) == set()
    assert {"layers", "norm", "rope", "d2t", "draft vocabulary", "context length", "rounding"} <= set(levels)


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_off_by_one(found, shift):
    layers = [k + shift for k in LAYERS]
    planted = {
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in layers], "use_aux_hidden_state": True},
    }
    assert "layers" in faults(found(planted))


def test_one_engine_told_other_layers_than_the_other(found):
    planted = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True}}
    assert faults(found(planted)) == {"layer numbering"}


def test_wrong_norm(found):
    assert faults(found({"norm_output": True})) == {"norm"}


def test_rope(found):
    assert "rope" in faults(found({"rope_theta": 500.0}))


def test_context_length(found):
    assert faults(found({"max_position_embeddings": 64})) == {"context length"}


def test_stale_d2t(found):
    """Another training's vocabulary beside this one's projection: as sound in itself."""

    def other(tensors):
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:200].sort().values
        tensors["d2t"] = ids - torch.arange(200)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), ids)

    assert "d2t" in faults(found(tensors=other))


def test_absolute_ids_in_d2t_are_refused_by_name(found):
    def absolute(tensors):
        tensors["d2t"] = tensors["d2t"] + torch.arange(200)

    with pytest.raises(UserError, match="d2t"):
        found(tensors=absolute)


def test_dtype(found):
    def large(tensors):
        tensors["fc.weight"][0, 0] = 1e6

    assert "dtype" in faults(found(tensors=large, dtype="float16"))
    assert "dtype" not in faults(found(tensors=large, dtype="bfloat16"))
    with pytest.raises(UserError, match=r"serving\.dtype"):
        found(dtype="int8")


def test_chat_template_and_target(target, prompts, run, tmp_path):
    other = train_tokenizer(QUESTIONS, VOCAB, 256)
    other.chat_template += " "
    other.save_pretrained(tmp_path / "tokenizer")
    serving = Serving(tokenizer=str(tmp_path / "tokenizer"))
    levels = {f.check: f.level for f in run_checks(LoadedDrafter.load(run, target), prompts, serving, 32)}
    assert faults(levels) == {"chat template"}
    changed = Target.from_model(LlamaForCausalLM(target.model.config), tokenizer=target.tokenizer)
    assert "target" in faults(
        {f.check: f.level for f in run_checks(LoadedDrafter.load(run, changed), prompts, Serving(), 32)}
    )


def test_traffic_outside_the_draft_vocabulary_and_under_another_system_prompt(target, run):
    unlike = [Prompt(str(i), "x", ({"role": "user", "content": f"%% ~{i} @@ " * 3},)) for i in range(12)]
    system = "; ".join("print(x)" for _ in range(12))
    findings = run_checks(LoadedDrafter.load(run, target), unlike, Serving(system_prompt=system), 32)
    assert {"draft vocabulary", "system prompt"} <= {finding.check for finding in findings}


@pytest.fixture
def plain(target, monkeypatch) -> Target:
    """The target, its tokenizer's chat template lost."""
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    return target


def test_no_chat_template(plain, prompts, run):
    """Lone texts need none: worth knowing where it is not recorded that the training had one, a fault where it is."""
    trained = LoadedDrafter.load(run, plain)
    for loaded, level, said in (
        (LoadedDrafter(trained.drafter, plain), Level.NOTE, "the tokenizer has none, so that prompts are plain text"),
        (trained, Level.FAULT, "served with no template, trained with"),
    ):
        found = {finding.check: finding for finding in run_checks(loaded, prompts, Serving(), 32)}
        assert found["chat template"].level is level and said in found["chat template"].sentence
        assert "layers" in found


def test_conversations_without_a_chat_template(plain, prompts, run, found):
    assert faults(found(system_prompt="be brief")) == {"prompts"}
    chat = [Prompt("0", "chat", ({"role": "system", "content": "be brief"}, *prompts[0].opening))]
    assert "prompts" in faults({f.check: f.level for f in run_checks(LoadedDrafter.load(run, plain), chat)})


def test_a_target_that_says_too_little(target, prompts, run, monkeypatch):
    monkeypatch.setattr(Target, "eos_token_ids", frozenset(range(VOCAB)))
    findings = run_checks(LoadedDrafter.load(run, target), prompts, Serving(system_prompt="be brief"), 32)
    text = report(findings)
    assert "answers" in {finding.check for finding in findings} and "said too little to judge by, 12 tokens" in text
    assert "nan" not in text and "0 fault(s)" in text
    assert not {"layers", "norm", "rounding", "system prompt", "draft vocabulary"} & {f.check for f in findings}


def test_predictions_that_are_not_finite(target, prompts, run):
    loaded = LoadedDrafter.load(run, target)
    with torch.no_grad():
        loaded.drafter.fc.weight[0, 0] = torch.nan
    text = report(findings := run_checks(loaded, prompts, max_new_tokens=32))
    assert "answers" in faults({finding.check: finding.level for finding in findings}) and " nan " not in text


def test_a_reader_of_the_report_sees_faults_last(target, prompts, run):
    findings = run_checks(LoadedDrafter.load(run, target), prompts, Serving(max_model_len=1000), 32)
    text = report(findings)
    levels = [line.split()[0] for line in text.splitlines() if line[:1].strip()][:-1]
    assert levels[-1] == "FAULT" and levels.count("FAULT") == 1 and levels[0] == "ok"
    assert all(len(line) <= 110 for line in text.splitlines())


def test_neither_a_checkpoint_nor_an_export(target, tmp_path):
    with pytest.raises(UserError, match="no drafter checkpoint"):
        LoadedDrafter.load(tmp_path, target)
