"""Quantized exports are read back with the codes and scales that are served; those of others are refused."""

import json
from dataclasses import asdict

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.quantization import SCHEMES, QuantizedLinear, quantize_weight, ready_to_decode, round_weight
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.quantized import quantization_config
from specdraft.export.vllm import VLLM
from tests.fakes import random_prompts

NAMES = sorted(SCHEMES)
OPTIONS = {
    "eagle3": {"intermediate_size": 64, "num_layers": 2, "own_embedding": True},
    "draft_model": {"start": "scratch", "shape": {"num_hidden_layers": 1, "intermediate_size": 64}},
}


@pytest.fixture
def served(make_drafter, save, tmp_path):
    """served(family, scheme, dtype) -> (the trained drafter's checkpoint, its quantized export)."""

    def make(family="eagle3", name="int8", dtype="float32"):
        checkpoint = save(make_drafter(family, **OPTIONS[family]))
        return checkpoint, export(checkpoint, VLLM(dtype=dtype), tmp_path / "public", quantization=name)

    return make


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", OPTIONS)
def test_it_comes_back_bit_by_bit(served, target, read_back, family, name, dtype):
    checkpoint, directory = served(family, name, dtype)
    kind, (trained, _) = getattr(torch, dtype), load_drafter(checkpoint, name)
    imported = import_head(directory, target)
    assert imported.quantization == name and imported.target is target
    theirs = dict(trained.to(kind).named_modules())
    for key, layer in imported.named_modules():
        if isinstance(layer, QuantizedLinear):
            ours = layer.weight.to(kind)
            assert layer.weight.dtype == torch.float32 and torch.equal(ours.float(), layer.weight), key
            both = (quantize_weight(weight, layer.scheme) for weight in (ours, theirs[key].weight))
            assert all(torch.equal(a, b) for a, b in zip(*both, strict=True)), key
            assert torch.equal(round_weight(ours, layer.scheme), round_weight(theirs[key].weight, layer.scheme)), key
        elif isinstance(parameter := getattr(layer, "weight", None), torch.Tensor):
            assert torch.equal(parameter, theirs[key].weight.float()), key
    read_back(imported, VLLM(dtype=dtype), directory)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", OPTIONS)
def test_it_drafts_what_the_checkpoint_drafts_in_that_scheme(served, target, tmp_path, family, name):
    checkpoint, directory = served(family, name)
    again = save_drafter(import_head(directory, target), tmp_path / "imported", target.identity)
    assert load_drafter(again)[1]["quantization"] == name
    rounds = []
    for drafter in (load_drafter(checkpoint, name)[0], load_drafter(again)[0]):
        drafter.bind(target)
        with ready_to_decode(drafter):
            said = Decoder(target, drafter, 4, trace=True).generate_batch(random_prompts(3, [5, 9]), 24, 3)
        rounds.append([(each.tokens, each.drafted, each.accepted, asdict(each.trace)) for each in said])
    assert rounds[0] == rounds[1] and sum(sum(drafted) for _, drafted, _, _ in rounds[0]) > 150


def scheme_of_others(directory, edit):
    said = json.loads((directory / "config.json").read_text())["quantization_config"]
    edit(directory, {"quantization_config": said | {"format": "float-quantized"}})


def other_scales(directory, edit):
    edit(directory, None, lambda tensors: tensors | {"fc.weight_scale": tensors["fc.weight_scale"] * 1.01})


def no_scales(directory, edit):
    edit(directory, None, lambda tensors: {n: each for n, each in tensors.items() if n != "fc.weight_scale"})


def no_codes(directory, edit):
    edit(directory, None, lambda tensors: {n: each for n, each in tensors.items() if n != "fc.weight"})


def other_dtype(directory, edit):
    edit(directory, {"torch_dtype": "float8"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            scheme_of_others,
            "quantized by 'compressed-tensors' in a scheme that is not read back: expected int8 or int4",
        ),
        (other_scales, "fc.weight is not what int8 makes of any weight in float32: expected codes and scales as"),
        (no_codes, "fc.weight is not what int8 makes of any weight in float32"),
        (no_scales, "fc.weight is not what int8 makes of any weight in float32"),
        (other_dtype, "fc.weight is not what int8 makes of any weight in float8"),
    ],
)
def test_what_is_refused(served, target, edit, change, said):
    _, directory = served()
    change(directory, edit)
    with pytest.raises(UserError, match=said):
        import_head(directory, target)


def test_a_family_that_engines_do_not_read_quantized_is_refused(make_drafter, save, target, edit, tmp_path):
    directory = export(save(make_drafter("medusa")), VLLM(dtype="float32"), tmp_path / "public")
    said, scheme = quantization_config(SCHEMES["int8"]), SCHEMES["int8"]
    edit(directory, {"quantization_config": said}, lambda tensors: compressed(tensors, scheme))
    with pytest.raises(UserError, match="not for the drafter medusa, of which engines read no quantized weights"):
        import_head(directory, target)


def compressed(tensors, scheme):
    matrices = {name: quantize_weight(each, scheme) for name, each in tensors.items() if each.ndim == 2}
    return tensors | {
        key: part for name, parts in matrices.items() for key, part in zip((name, f"{name}_scale"), parts, strict=True)
    }
