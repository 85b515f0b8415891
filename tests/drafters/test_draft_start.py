"""What an independent draft begins as: the target's layers, random weights, or a sibling."""

import re

import pytest
import torch
import transformers

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.draft_model import DraftModel
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.training.planning.meta_target import MetaTarget
from tests.drafters.drafts import PROMPT, features_of, logits_of, start_from, tokenizer_of, whole
from tests.fakes import random_prompts, tiny_llama
from tests.families import FAMILIES, V


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "qwen3-moe"])
def test_a_copy_of_all_layers_is_the_target(name):
    family = FAMILIES[name]
    target = Target.from_model(family.build(**({"final_logit_softcapping": None} if name == "gemma3" else {})))
    draft = DraftModel.for_target(target, copy_layers=4)
    if name == "qwen3-moe":
        draft.model.set_experts_implementation("eager")  # the grouped one knows no fp64
    draft.double()
    batch = whole(random_prompts(1, [20], V)[0])
    result = draft.training_loss(batch, features_of(target, batch), target)
    torch.testing.assert_close(result.loss, torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-6)
    assert result.metrics["step_0/match_sum"] == 19
    assert result.metrics["step_0/alpha_sum"] == pytest.approx(19, abs=1e-4)
    generation = Decoder(target, draft, 4).generate(PROMPT, 21)
    assert generation.accepted == [4] * 4


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3"])
def test_layers_are_copied_with_what_belongs_to_them(name):
    target = Target.from_model(FAMILIES[name].build())
    draft = DraftModel.for_target(target, copy_layers=[1, 2])
    theirs = target.decoder.state_dict()
    for key, tensor in draft.language_model.decoder.state_dict().items():
        source = re.sub(r"^layers\.(\d)", lambda place: f"layers.{int(place[1]) + 1}", key)
        assert torch.equal(tensor, theirs[source].float())
    assert torch.equal(draft.language_model.head.weight, target.head.weight.float())
    config = draft.language_model.config
    assert config.model_type == FAMILIES[name].model_type and config.num_hidden_layers == 2
    assert config.rope_parameters == target.config.rope_parameters
    assert getattr(config, "sliding_window", None) == getattr(target.config, "sliding_window", None)
    if name == "gemma3":
        assert config.layer_types == ["full_attention", "sliding_attention"]
        assert config.final_logit_softcapping is None


@pytest.mark.parametrize(("wanted", "layers"), [(1, [0]), (2, [0, 5]), (3, [0, 2, 5]), (6, [*range(6)]), ([3], [3])])
def test_which_layers_are_copied(target, wanted, layers):
    draft = DraftModel.for_target(target, copy_layers=wanted).double()
    norms = [layer.mlp.up_proj.weight for layer in draft.language_model.decoder.layers]
    assert len(norms) == len(layers)
    assert all(torch.equal(a, target.decoder.layers[k].mlp.up_proj.weight) for a, k in zip(norms, layers, strict=True))


def test_from_scratch(target):
    draft = DraftModel.for_target(target, start="scratch", shape={"hidden_size": 16, "num_hidden_layers": 3})
    model = draft.language_model
    assert (model.hidden_size, model.num_layers, model.vocab_size) == (16, 3, 97)
    assert model.config.model_type == "llama" and model.max_length == target.max_length
    assert DraftModel.for_target(target, start="scratch").language_model.num_layers == 1
    gemma = Target.from_model(FAMILIES["gemma3"].build())
    types = DraftModel.for_target(gemma, start="scratch", shape={"num_hidden_layers": 5}).language_model.config
    assert types.layer_types == ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]


def test_a_plan_needs_no_weights(sibling):
    with torch.device("meta"):
        blueprint = MetaTarget(tiny_llama().config, "shape")
    directory = sibling()
    with torch.device("meta"):
        for start in ("layers", "scratch", "checkpoint"):
            draft = DraftModel.for_target(blueprint, start=start, checkpoint=directory)
            assert all(parameter.is_meta for parameter in draft.parameters())


def test_a_sibling_keeps_its_weights(sibling, small):
    directory = sibling()
    draft = start_from(directory, small)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    expected = theirs(torch.tensor(random_prompts(1, [12]))).logits
    torch.testing.assert_close(logits_of(draft), expected, rtol=1e-5, atol=1e-5)
    assert all(parameter.requires_grad for parameter in draft.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 72}, r"a vocabulary of 72 tokens: expected the target's, 64"),
        ({"tokenizer": tokenizer_of(64, "u")}, "other tokens than the target's: expected the same vocabulary"),
    ],
)
def test_a_sibling_of_another_vocabulary_is_refused(sibling, small, options, message):
    with pytest.raises(UserError, match=message):
        start_from(sibling(**options), small)


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "expected model.drafter.checkpoint=PATH"), ("/nowhere", "there is no directory /nowhere")],
)
def test_a_missing_sibling_is_refused(small, name, message):
    with pytest.raises(UserError, match=message):
        start_from(name, small)
