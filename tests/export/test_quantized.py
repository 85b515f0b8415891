"""Quantized exports: the codes are those that our decoding computes with, and compressed-tensors reads the same."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdraft.drafters.checkpoint import load_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.quantization import SCHEMES, QuantizedLinear, dequantize_weight, round_weight
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.quantized import quantization_config
from specdraft.export.sglang import SGLang
from specdraft.export.transformers import Transformers
from specdraft.export.vllm import VLLM

NAMES = sorted(SCHEMES)


def unpacked(tensors, stem):
    """Codes ``[O, I]`` by plain arithmetic."""
    if f"{stem}.weight" in tensors:
        return tensors[f"{stem}.weight"]
    packed = tensors[f"{stem}.weight_packed"]
    return torch.stack([((packed >> 4 * place) & 15) - 8 for place in range(8)], dim=-1).flatten(1).to(torch.int8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["eagle3", "draft_model"])
def test_an_export_holds_what_decoding_computes_with(target, save, make_checkpoint, name, dtype, family):
    if family == "eagle3":
        _, checkpoint = make_checkpoint(intermediate_size=64, num_layers=2, own_embedding=True)
    else:
        shape = {"num_hidden_layers": 1, "intermediate_size": 64}
        checkpoint = save(DraftModel.for_target(target, start="scratch", shape=shape))
    directory = export(checkpoint, VLLM(dtype=dtype), quantization=name)
    drafter = load_drafter(checkpoint, name)[0].to(getattr(torch, dtype))
    tensors = load_file(directory / "model.safetensors")
    layers = {key: layer for key, layer in drafter.named_modules() if isinstance(layer, QuantizedLinear)}
    stems = sorted(key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale"))
    written = {key.removeprefix("model.").replace("later.0", "layers.1"): key for key in layers}
    assert sorted(written) == stems and len(stems) >= 7
    for stem in stems:
        layer = layers[written[stem]]
        ours = round_weight(layer.weight, layer.scheme)
        theirs = dequantize_weight(unpacked(tensors, stem), tensors[f"{stem}.weight_scale"]).to(ours.dtype)
        assert torch.equal(ours, theirs), stem
    config = json.loads((directory / "config.json").read_text())
    assert config["quantization_config"] == quantization_config(SCHEMES[name])
    assert f"| quantization | {name} (weights of" in (directory / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_reads_the_same(make_checkpoint, name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    head, checkpoint = make_checkpoint(intermediate_size=64)
    directory = export(checkpoint, VLLM(), quantization=name)
    tensors = load_file(directory / "model.safetensors")
    said = json.loads((directory / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(said).config_groups["group_0"]
    stem, scheme = "midlayer.mlp.up_proj", SCHEMES[name]
    own = {key.removeprefix(f"{stem}."): tensor for key, tensor in tensors.items() if key.startswith(f"{stem}.")}
    read = BaseCompressor.get_value_from_registry(said["format"]).decompress(own, group)["weight"]
    weight = head.get_submodule(stem).weight
    assert torch.equal(read, round_weight(weight, scheme))
    parts = weight.unflatten(1, (-1, scheme.group or weight.shape[1]))
    scales, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), group.weights)
    assert torch.allclose(scales, own["weight_scale"])


def test_a_drafter_trained_so_is_exported_so(make_checkpoint):
    _, checkpoint = make_checkpoint(intermediate_size=64)
    stored = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(stored | {"quantization": "int4"}))
    directory = export(checkpoint, VLLM())
    assert "fc.weight_packed" in load_file(directory / "model.safetensors")


def test_the_card_shows_no_figures_of_other_weights(make_checkpoint):
    _, checkpoint = make_checkpoint()
    settings = {"prompts": 40, "max_new_tokens": 128, "draft_tree": "chain of 4", "dtype": "float32", "device": "cpu"}
    row = {"drafter": "eagle3", "temperature": 0.0, "acceptance_length": 2.345, "draft_acceptance_rate": 0.3}
    row |= {"speedup": 1.5, "conditional_acceptance_rate": [0.75]}
    for measured, shown in ((None, False), ("int8", True)):
        evaluation = {"created": "2026-01-02", "settings": settings | {"quantization": measured}, "results": [row]}
        (checkpoint.parent / "evaluation.json").write_text(json.dumps(evaluation))
        card = (export(checkpoint, VLLM(), quantization="int8") / "README.md").read_text()
        assert ("2.35" in card) is shown and ("Not measured" in card) is not shown


def test_refusals(target, save, make_checkpoint):
    _, checkpoint = make_checkpoint()
    with pytest.raises(UserError, match="sglang is not known to serve a quantized EAGLE-3 head"):
        export(checkpoint, SGLang(), quantization="int8")
    with pytest.raises(UserError, match="reads 48 features, which cannot be quantized in groups"):
        export(checkpoint, VLLM(), quantization="int4")
    draft = save(DraftModel.for_target(target, start="scratch", shape={"num_hidden_layers": 1}))
    with pytest.raises(UserError, match="transformers is not known to serve a quantized draft model"):
        export(draft, Transformers(), quantization="int8")
