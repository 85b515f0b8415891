"""Targets from files: what was saved comes back, and whatever is amiss is said in one sentence."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.loading import recorded_name
from tests.fakes import tiny_llama
from tests.families import FAMILIES


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 128)


@pytest.fixture
def saved(tmp_path, tokenizer):
    """A directory with a tiny bf16 Llama and its tokenizer."""
    model = tiny_llama(vocab_size=300)
    model.generation_config.eos_token_id = [1, 2]
    model.bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def refused(name, **options) -> str:
    with pytest.raises(UserError) as caught:
        Target.load(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "expected" in message
    return message


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float32", torch.float32)]
)
def test_what_was_saved_comes_back(saved, dtype, expected):
    target = Target.load(str(saved), dtype=dtype, device="cpu", packed=False)
    assert target.dtype == expected
    assert target.eos_token_ids == {1, 2}
    assert target.tokenizer.decode(target.tokenizer("return a").input_ids) == "return a"
    original = tiny_llama(vocab_size=300).bfloat16()
    for ours, theirs in zip(target.model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(expected))
    assert target.identity == Target.load(str(saved), device="cpu").identity
    assert target.identity.name == str(saved)


def test_the_identity_is_alike_in_every_dtype(tmp_path, tokenizer):
    """float16 has fewer bits for small numbers, bfloat16 for all."""
    model = tiny_llama(vocab_size=300)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 ** torch.empty_like(parameter).uniform_(-7, 0))
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"device": "cpu", "packed": False}
    loaded = [Target.load(str(tmp_path), dtype=dtype, **options) for dtype in ("bfloat16", "float16", "float32")]
    pairs = zip(*(target.model.parameters() for target in loaded[:2]), strict=True)
    assert not all(torch.equal(ours.float(), theirs.float()) for ours, theirs in pairs)
    assert len({target.identity for target in loaded}) == 1
    with torch.no_grad():
        next(loaded[0].model.parameters()).view(-1)[3] += 0.01
    assert Target.from_model(loaded[0].model).identity.weights_hash != loaded[1].identity.weights_hash


def test_attention_implementation_is_passed_on(saved):
    for asked, found in (("auto", "sdpa"), ("eager", "eager")):
        target = Target.load(str(saved), device="cpu", attn_implementation=asked)
        assert target.config._attn_implementation == found


def test_attention_that_the_architecture_has(tmp_path, tokenizer):
    """gpt-oss has attention sinks, which sdpa does not know."""
    FAMILIES["gpt-oss"].build(vocab_size=300).float().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert Target.load(str(tmp_path), device="cpu").config._attn_implementation == "eager"
    message = refused(tmp_path, device="cpu", attn_implementation="sdpa")
    assert message.endswith("has no sdpa attention in transformers: expected target.attn_implementation=auto or eager")


def test_missing_names(tmp_path):
    assert "no-such-owner/no-such-model" in refused("no-such-owner/no-such-model")
    assert refused(tmp_path / "nowhere").startswith(
        f"there is no directory {tmp_path / 'nowhere'}: expected the target"
    )
    for name in ("./nowhere", "../nowhere", "~/nowhere"):
        assert refused(name).startswith(f"there is no directory {name}: expected the target there, a local")
    assert refused("embedded://nowhere") == "there is no embedded target 'embedded://nowhere': expected embedded://tiny"


def test_a_relative_directory_is_recorded_as_a_whole_path(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    for name in (f"./{saved.name}", saved.name, str(saved)):
        assert Target.load(name, device="cpu").identity.name == str(saved)
    for name in ("embedded://tiny", "owner/model", "./nowhere"):
        assert recorded_name(name) == name


def test_a_directory_of_the_users_own(saved, monkeypatch):
    """In ``target.name=~/model`` the shell leaves the ``~``."""
    monkeypatch.setenv("HOME", str(saved.parent))
    target = Target.load("~/model", device="cpu")
    assert target.identity.name == "~/model" and target.tokenizer is not None


def test_bad_dtype(saved):
    assert refused(saved, dtype="int8").startswith("target.dtype is 'int8': expected one of auto, float32")


def test_corrupted_weights(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(saved) in refused(saved)


def test_weights_of_another_shape(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert str(saved) in refused(saved)


def test_missing_weights_are_not_made_up(saved):
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    assert "lack 1 of its weights, model.layers.1.mlp.up_proj.weight among them" in refused(saved)


def test_no_causal_lm(tmp_path, tokenizer):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 300}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "T5Config" in refused(tmp_path)


def test_no_tokenizer(saved):
    for file in saved.glob("tokenizer*"):
        file.unlink()
    assert refused(saved).startswith(f"cannot load the tokenizer of the target '{saved}' (")


def test_an_adapter_that_is_not_merged(saved):
    (saved / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert f"{saved} holds an adapter of org/base (adapter_config.json): expected whole weights" in refused(saved)


def test_end_marks_that_cannot_be_read(saved):
    """transformers warns of such a file, and an answer would end at the marks of config.json alone."""
    (saved / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config.json is not readable JSON .*: restore or rewrite the file"):
        Target.load(str(saved), device="cpu")
