"""Adapters beside the weights and merged are the same model, and the frozen target stays as it is."""

import copy

import pytest
import torch

from specdraft.drafters.jacobi_forcing.adapters import Adapters, adapted, find_layers, merged
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.drafters.jacobi_forcing.conftest import trained
from tests.fakes import tiny_llama
from tests.families import FAMILIES, V

IDS = torch.arange(12)[None]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_layers_are_named_as_peft_does_and_the_head_is_left_out(small):
    every = find_layers(small, "all-linear")
    assert len(every) == 2 * 7 and not any("lm_head" in name for name in every)
    assert every["model.layers.1.mlp.down_proj"] == [48, 32]
    some = find_layers(small, ["q_proj", "down_proj"])
    assert sorted(some) == sorted(name for name in every if name.endswith(("q_proj", "down_proj")))
    assert list(find_layers(small, r".*layers\.0.*v_proj")) == ["model.layers.0.self_attn.v_proj"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe", "granite"])
def test_merged_weights_are_those_beside_which_the_adapters_stand(family):
    target = Target.from_model(FAMILIES[family].build())
    before, was = copy.deepcopy(target.model.state_dict()), logits(target.model)
    drafter = trained(target)
    beside = adapted(target, drafter.adapters, drafter.alpha)
    together = merged(target, drafter.adapters, drafter.alpha)
    torch.testing.assert_close(logits(beside), logits(together))
    assert (logits(together) - was).abs().max() > 0.05
    # Nothing of the target has changed, and nothing but what is adapted is there twice.
    torch.testing.assert_close(logits(target.model), was, rtol=0, atol=0)
    assert all(torch.equal(before[name], value) for name, value in target.model.state_dict().items())
    own = {id(parameter) for parameter in target.model.parameters()}
    apart = {name for name, parameter in together.named_parameters() if id(parameter) not in own}
    assert apart == {f"{name}.weight" for name in drafter.adapters.names}
    names = {id(parameter) for parameter in drafter.parameters()}
    assert {id(each) for each in beside.parameters() if id(each) not in own} == names


def test_adapters_begin_with_no_change(small):
    adapters = Adapters(find_layers(small, "all-linear"), 3).double()
    assert torch.equal(logits(merged(small, adapters, 6)), logits(small.model))
    assert all(pair.A.weight.abs().sum() > 0 for pair in map(adapters.pair, adapters.names))


def test_a_target_with_packed_weights_stays_packed():
    target = Target.from_model(tiny_llama())
    plain = trained(target).tuned(target)
    target.pack()
    assert target.packed and not plain.packed
    drafter = trained(target)
    tuned = drafter.tuned(target)
    assert tuned.packed and target.packed
    torch.testing.assert_close(logits(tuned.model), logits(plain.model), rtol=1e-4, atol=1e-4)
    beside = adapted(target, drafter.adapters, drafter.alpha)
    torch.testing.assert_close(logits(beside), logits(plain.model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        (["no_proj"], "names no layer of the target: expected all-linear, a list"),
        (["q_proj", "lm_head"], "names lm_head: expected all-linear, a list"),
        (["embed_tokens"], "names model.embed_tokens: expected all-linear, a list"),
        (r"layers\.0", "names no layer of the target"),
    ],
)
def test_modules_that_cannot_be_adapted(target, modules, sentence):
    with pytest.raises(UserError, match=sentence):
        find_layers(target, modules)


def test_targets_that_cannot_be_tuned(small, target):
    adapters = Adapters(find_layers(small, "all-linear"), 3)
    with pytest.raises(UserError, match=r"no layer model\.layers\.0\.self_attn\.q_proj of the shape"):
        merged(Target.from_model(tiny_llama(hidden_size=16)), adapters, 6)
    sharded = Target.from_model(tiny_llama(V))
    sharded.engine = object()
    with pytest.raises(UserError, match=r"expected target\.placement=replicated"):
        find_layers(sharded, "all-linear")
    quantized = Target.from_model(tiny_llama(V))
    quantized.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UserError, match=r"weights are quantized \(fp8\)"):
        find_layers(quantized, "all-linear")
