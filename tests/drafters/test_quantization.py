"""Quantized drafters: the numbers, the gradients, and that one module trains, decodes and is saved."""

import json

import pytest
import torch
from torch import nn

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import Eagle3, PEagle
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.objective import DraftHead
from specdraft.drafters.quantization import (
    SCHEMES,
    IntegerLinear,
    QuantizedLinear,
    RoundedInput,
    Scheme,
    dequantize_weight,
    find_scheme,
    quantize,
    quantize_weight,
    ready_to_decode,
    restore_weight,
    round_input,
    round_weight,
)
from specdraft.errors import UserError
from specdraft.onednn import PackedLinear
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

NAMES = sorted(SCHEMES)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(tiny_llama(intermediate_size=64))


def head_of(target: Target, name: str | None) -> Eagle3:
    torch.manual_seed(3)
    head = Eagle3.for_target(target, layers=[1, 2]).eval()
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    quantize(head, name)
    return head


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales(name, dtype):
    scheme = SCHEMES[name]
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[5] = 0
    codes, scales = quantize_weight(weight, scheme)
    most = 2 ** (scheme.bits - 1)
    assert codes.dtype == torch.int8 and codes.min() >= -most and codes.max() <= most - 1
    assert scales.shape == (48, 64 // (scheme.group or 64))
    assert scales.dtype == (torch.float32 if scheme.input_bits else dtype)
    step = scales.float().repeat_interleave(scheme.group or 64, dim=1)
    error = (dequantize_weight(codes, scales) - weight.float()).abs()
    assert (error <= 0.52 * step).all()  # half a step, and what rounding a scale adds
    assert not dequantize_weight(codes, scales)[5].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_restored_weight_has_the_same_codes_and_scales(name, dtype, sign):
    """A thousand groups, with every mantissa of bfloat16 as the largest number of a group, of either sign. What the
    codes stand for has other scales, up to a fifteenth."""
    scheme = SCHEMES[name]
    weight = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    weight[:256] = weight[:256].clamp(-0.9, 0.9)
    weight[:256, 3] = sign * torch.linspace(1, 2, 257)[:256]
    weight[256:512] = sign * weight[256:512].abs()
    weight = (weight * torch.logspace(-2, 1, 1024)[:, None]).to(dtype)
    codes, scales = quantize_weight(weight, scheme)
    again = quantize_weight(restore_weight(codes, scales, scheme, dtype), scheme)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    _, other = quantize_weight(round_weight(weight, scheme), scheme)
    assert (other != scales).float().mean() > 0.9
    nothing = quantize_weight(torch.zeros(2, 64), scheme)
    assert not restore_weight(*nothing, scheme, dtype).any()


def test_inputs_have_a_scale_for_each_token():
    given = torch.tensor([[1.0, -0.5, 0.1], [100.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    rounded = round_input(given, Scheme(8, input_bits=8))
    assert rounded[0].tolist() == pytest.approx([1.0, -64 / 127, 13 / 127])
    assert rounded[1].tolist() == pytest.approx([100.0, 100 / 127, 0.0])
    assert not rounded[2].any()
    assert round_input(given, Scheme(4, 32)) is given


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_passes_straight_through(name):
    scheme = SCHEMES[name]
    linear = nn.Linear(64, 8)
    layer = QuantizedLinear(linear, scheme)
    given = torch.randn(5, 64, requires_grad=True)
    output = layer(given)
    weight, rounded = round_weight(linear.weight, scheme), round_input(given, scheme)
    assert torch.equal(output, nn.functional.linear(rounded, weight, linear.bias))
    wanted = torch.randn_like(output)
    output.backward(wanted)
    assert torch.allclose(linear.weight.grad, wanted.T @ rounded, atol=1e-6)
    assert torch.allclose(given.grad, wanted @ weight, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(layer(given), output)  # the same numbers, whoever asks


@pytest.mark.parametrize("name", NAMES)
def test_all_but_the_vocabulary_is_quantized_and_names_stay(target, name):
    plain, head = head_of(target, None), head_of(target, name)
    assert all(torch.equal(head.state_dict()[key], value) for key, value in plain.state_dict().items())
    kinds = {key: type(module) for key, module in head.named_modules() if isinstance(module, nn.Linear)}
    assert {key for key, kind in kinds.items() if kind is not QuantizedLinear} == {"lm_head"}
    assert kinds["lm_head"] is DraftHead and head.quantization == name and len(kinds) == 9


@pytest.mark.parametrize("name", NAMES)
def test_decoding_rounds_once_and_gives_the_targets_tokens(target, name):
    head, prompts = head_of(target, name), random_prompts(2, [5, 9])
    expected = transformers_greedy(target.model, prompts, 16)
    decoder = Decoder(target, head, 3)
    slow = [decoder.generate(prompt, 16) for prompt in prompts]
    layer = head.midlayer.mlp.up_proj
    with torch.inference_mode(), ready_to_decode(head):
        kinds = {type(module) for module in head.modules() if isinstance(module, nn.Linear)}
        assert kinds <= {PackedLinear, nn.Linear, DraftHead}
        fast = [decoder.generate(prompt, 16) for prompt in prompts]
    assert head.midlayer.mlp.up_proj is layer
    assert [each.tokens for each in slow] == [each.tokens for each in fast] == expected
    assert [each.accepted for each in slow] == [each.accepted for each in fast]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_integers_are_multiplied_as_training_rounds(dtype):
    linear = nn.Linear(64, 48).to(dtype)
    given = torch.randn(2, 5, 64).to(dtype)
    given[1, 2] = 0
    layer = QuantizedLinear(linear, SCHEMES["int8"])
    found, expected = IntegerLinear(layer)(given), layer(given)
    assert found.dtype == dtype and found.shape == (2, 5, 48)
    assert torch.allclose(found, expected, atol=1e-6 if dtype == torch.float32 else 1e-2)
    assert not torch.allclose(expected.float(), linear(given).float(), atol=1e-4)


def test_integers_are_for_processors_that_sum_them_exactly(monkeypatch):
    layer = QuantizedLinear(nn.Linear(64, 8), SCHEMES["int8"])
    for exact, kind in ((True, IntegerLinear), (False, RoundedInput)):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda exact=exact: exact)
        assert type(layer.settled()) is kind
    assert type(QuantizedLinear(nn.Linear(64, 8), SCHEMES["int4"]).settled()) is nn.Linear


def test_a_checkpoint_says_how_it_computes_and_holds_the_masters(target, tmp_path):
    head = head_of(target, "int4")
    directory = save_drafter(head, tmp_path / "drafter", target.identity)
    loaded, config = load_drafter(directory)
    assert config["quantization"] == loaded.quantization == "int4"
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in head.state_dict().items())
    assert load_drafter(directory, "int8")[0].quantization == "int8"
    stored = json.loads((directory / "config.json").read_text())
    del stored["quantization"]  # of an earlier version
    (directory / "config.json").write_text(json.dumps(stored))
    assert load_drafter(directory)[0].quantization is None


def test_refusals(target):
    with pytest.raises(UserError, match="quantize is 'int5': expected int8, int4, or null"):
        find_scheme("int5")
    with pytest.raises(UserError, match="of which engines read no quantized weights: expected eagle3"):
        quantize(Medusa.for_target(target, num_heads=2), "int8")
    with pytest.raises(UserError, match="quantize=int4 is not for the drafter p_eagle"):  # vLLM stops at its mask
        quantize(PEagle.for_target(target, layers=[1, 2]), "int4")
    odd = Eagle3.for_target(target, layers=[1, 2], intermediate_size=40)
    with pytest.raises(UserError, match=r"reads 40 features, .* expected a multiple of 32"):
        quantize(odd, "int4")


def test_adapters_are_merged_first():
    pytest.importorskip("peft")
    target = Target.from_model(tiny_llama())
    draft = DraftModel.for_target(target, start="scratch")
    draft.adapt({"r": 2, "target_modules": ["q_proj"]})
    with pytest.raises(UserError, match="expected a drafter without lora"):
        quantize(draft, "int8")
    quantize(draft.served(), "int8")
