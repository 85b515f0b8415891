"""Targets that transformers loads with a quantization: the values that were quantized, decoded losslessly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.checkpoint import about_target, check_target, load_drafter, save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.fakes import tiny_llama

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def original(tmp_path: Path) -> LlamaForCausalLM:
    """In ``tmp_path/original``, with a tokenizer."""
    model = tiny_llama(vocab_size=300, num_hidden_layers=4).eval()
    model.save_pretrained(tmp_path / "original")
    train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 96).save_pretrained(tmp_path / "original")
    return model


@pytest.fixture
def compressed(original: LlamaForCausalLM, tmp_path: Path) -> tuple[Path, LlamaForCausalLM]:
    """(int8 weights, one scale a row, in compressed-tensors' format; the model that they are rounded from)."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.float32)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    scheme = {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}
    groups = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"], "format": "int-quantized"}
    apply_quantization_config(model, QuantizationConfig.model_validate(groups))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.copy_(module.weight.abs().amax(1, keepdim=True) / 127)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="int-quantized")
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "compressed")
    compressor.update_config(tmp_path / "compressed")
    train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 96).save_pretrained(tmp_path / "compressed")
    return tmp_path / "compressed", original


def test_compressed_tensors_are_the_rounded_weights(compressed: tuple[Path, LlamaForCausalLM]) -> None:
    directory, original = compressed
    target = Target.load(str(directory), dtype="float32", device="cpu")
    assert about_target(target)["quantization"] == "compressed-tensors"
    with torch.no_grad():
        for name, weight in original.named_parameters():
            if "proj" in name:
                scale = weight.abs().amax(1, keepdim=True) / 127
                weight.copy_((weight / scale).round().clamp(-128, 127) * scale)
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(target.model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)
    _decodes(target)


def test_torchaos_tensors_compute_by_themselves(original: LlamaForCausalLM, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import TorchAoConfig

    settings = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    options: Any = {"dtype": torch.float32, "quantization_config": settings}
    AutoModelForCausalLM.from_pretrained(tmp_path / "original", **options).save_pretrained(tmp_path / "quantized")
    train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 96).save_pretrained(tmp_path / "quantized")
    target = Target.load(str(tmp_path / "quantized"), dtype="float32", device="cpu")
    assert about_target(target)["quantization"] == "torchao"
    _decodes(target)


def test_a_head_for_other_weights_is_told_how_they_differ(
    compressed: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    whole = Target.load(str(tmp_path / "original"), dtype="float32", device="cpu")
    quantized = Target.load(str(compressed[0]), dtype="float32", device="cpu")
    for trained, given, said in (
        (whole, quantized, r"\(compressed-tensors, and not none as in training\)"),
        (quantized, whole, r"\(none, and not compressed-tensors as in training\)"),
    ):
        head = Eagle3.for_target(trained, torch.arange(0, 300, 3))
        save_drafter(head, tmp_path / "head", trained.identity, {"target": about_target(trained)})
        config = load_drafter(tmp_path / "head")[1]
        check_target(config, trained)
        with pytest.raises(UserError, match=f"which has weights quantized otherwise {said}"):
            check_target(config, given)


def _decodes(target: Target) -> None:
    """Drafts change no token, and are made from the target's own features."""
    head = Eagle3.for_target(target, torch.arange(0, 300, 3)).eval()
    plain = Decoder(target).generate(PROMPT, 24).tokens
    assert Decoder(target, head, 3).generate(PROMPT, 24).tokens == plain
    expected = target.model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)
    assert plain == expected[0, len(PROMPT) :].tolist()[: len(plain)]
