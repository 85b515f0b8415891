"""Faults that the files alone show, each planted in a sound head and found by its name."""

import copy
import json

import pytest
import torch
from transformers import LlamaForCausalLM

from specdraft.doctor import Level, LoadedDrafter, Serving, run_checks
from specdraft.doctor.files import check_files
from specdraft.drafters.checkpoint import about_target, save_drafter
from specdraft.drafters.dflash import DFlash
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import Eagle
from specdraft.drafters.medusa import Medusa
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from specdraft.targets.chat_template import BOUND, template_hash
from tests.doctor.common import LAYERS, QUESTIONS, VOCAB, faults


def test_other_layers_for_one_engine_than_for_the_other(found):
    planted = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True}}
    assert faults(found(planted)) == {"layer numbering"}


def test_rope(found):
    assert "rope" in faults(found({"rope_theta": 500.0}))


def test_context_length(found):
    assert faults(found({"max_position_embeddings": 64})) == {"context length"}


def test_contexts_longer_than_trained(target, prompts, run):
    findings = run_checks(LoadedDrafter.load(run, target), prompts, Serving(max_model_len=200), 32)
    assert findings["context length"].level is Level.NOTE
    assert "sequences of 128 tokens, served up to 200" in findings["context length"].sentence


def test_a_d2t_of_another_training(found):
    """It is sound in itself, but belongs to another lm_head."""

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

    assert {"dtype", "rounding"} <= faults(found(tensors=large, dtype="float16"))
    assert "dtype" not in faults(found(tensors=large, dtype="bfloat16"))
    with pytest.raises(UserError, match=r"serving\.dtype"):
        found(dtype="int8")


def test_chat_template_and_target(target, prompts, run, tmp_path):
    other = train_tokenizer(QUESTIONS, VOCAB, 256)
    other.chat_template += " "
    other.save_pretrained(tmp_path / "tokenizer")
    serving = Serving(tokenizer=str(tmp_path / "tokenizer"))
    assert faults(run_checks(LoadedDrafter.load(run, target), prompts, serving, 32)) == {"chat template"}
    changed = Target.from_model(LlamaForCausalLM(target.model.config), tokenizer=target.tokenizer)
    assert "target" in faults(run_checks(LoadedDrafter.load(run, changed), prompts, Serving(), 32))


def test_options_of_the_chat_template(target, prompts, run, monkeypatch):
    monkeypatch.setattr(target.tokenizer, "chat_template", "{# enable_thinking #}" + target.tokenizer.chat_template)
    loaded = LoadedDrafter.load(run, target)
    about = loaded.checkpoint["extra"]["target"] | {"chat_template_hash": template_hash(target.tokenizer)}
    loaded.checkpoint["extra"]["target"] = about
    options = {"enable_thinking": False}
    monkeypatch.setattr(target.tokenizer, BOUND, options, raising=False)
    found = run_checks(loaded, prompts, Serving(), 32)["chat template"]
    assert found.level is Level.FAULT and "trained with no options of the chat template" in found.sentence
    loaded.checkpoint["extra"]["target"] = about | {"chat_template_options": options}
    found = run_checks(loaded, prompts, Serving(), 32)["chat template"]
    assert found.level is Level.OK and '{"enable_thinking": false}' in found.sentence


def test_no_chat_template(plain, prompts, run):
    """Lone texts need none: it is a note if none is recorded of the training, a fault if one is."""
    trained = LoadedDrafter.load(run, plain)
    for loaded, level, said in (
        (LoadedDrafter(trained.drafter, plain), Level.NOTE, "the tokenizer has none, so prompts are plain text"),
        (trained, Level.FAULT, "served with no template, trained with"),
    ):
        findings = run_checks(loaded, prompts, Serving(), 32)
        assert findings["chat template"].level is level and said in findings["chat template"].sentence
        assert "layers" in findings


def test_key_norms_that_differ_by_layer(target, tmp_path):
    """vLLM on a CPU takes the first layer's for all."""
    drafter = DFlash.for_target(target, layers=LAYERS, num_layers=3)
    about = {"target": about_target(target)}

    def finding():
        path = save_drafter(drafter, tmp_path / "drafter", target.identity, about)
        return check_files(LoadedDrafter.load(path, target), Serving())["key norms"]

    assert finding().level is Level.OK
    drafter.decoder_layers[2].self_attn.k_norm.weight.data[3] *= 1.5
    assert finding().level is Level.NOTE and "differ by up to 50%: vLLM 0.32 on a CPU" in finding().sentence


def test_an_export_served_with_other_weights(target, prompts, found, tmp_path):
    """As of a checkpoint; what was slightly tuned is another target, and a file of others says nothing."""
    assert "with the same weights" in found()["target"].sentence
    assert "as in training" in found()["chat template"].sentence
    tuned = copy.deepcopy(target.model)
    with torch.no_grad():
        tuned.model.layers[3].mlp.up_proj.weight.mul_(1.02)
    folder, other = tmp_path / "served", Target.from_model(tuned, tokenizer=target.tokenizer)
    findings = run_checks(LoadedDrafter.load(folder, other), prompts, Serving(), 32)
    assert "target" in faults(findings) and "has other weights than the given" in findings["target"].sentence
    (folder / "target.json").unlink()
    assert check_files(LoadedDrafter.load(folder, other), Serving())["target"].level is Level.NOTE


def test_weights_that_are_zero_or_not_finite(target, found, run):
    def zero(tensors):
        for tensor in tensors.values():
            if tensor.ndim == 2:
                tensor.zero_()

    findings = found(tensors=zero)
    assert "weights" in faults(findings) and "are zero throughout" in findings["weights"].sentence
    one = found(tensors=lambda tensors: tensors["fc.weight"].zero_())["weights"]
    assert one.level is Level.FAULT and "1 are zero throughout (fc.weight)" in one.sentence
    loaded = LoadedDrafter.load(run, target)
    loaded.drafter.fc.weight.data[0, 0] = torch.inf
    assert "fc.weight hold values that are not finite" in check_files(loaded, Serving())["weights"].sentence


def test_weights_that_training_begins_with(target):
    """Residual blocks of Medusa's heads are zeros at first, which is no fault."""
    drafter = Medusa.for_target(target)
    assert check_files(LoadedDrafter(drafter, target), Serving())["weights"].level is Level.NOTE


def test_biases_that_an_engine_leaves_out(target, prompts, tmp_path):
    """Public Medusa heads have them, and a config.json from which vLLM concludes that they have none."""
    heads = Medusa.for_target(target, num_heads=2)
    torch.nn.init.normal_(heads.blocks[0].layers[0].bias)
    save_drafter(heads, tmp_path / "drafter", target.identity, {"target": about_target(target)})
    folder = export(tmp_path / "drafter", VLLM("float32"), tmp_path / "served")
    assert check_files(LoadedDrafter.load(folder, target), Serving())["biases"].level is Level.OK
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_fc_bias": False}))
    findings = run_checks(LoadedDrafter.load(folder, target), prompts, Serving(), 16)
    assert faults(findings) == {"biases"} and "medusa_fc_bias=true" in findings["biases"].sentence


@pytest.mark.parametrize("kind", [Eagle, DraftModel])
def test_exports_of_other_families_are_examined_as_they_are_served(target, prompts, tmp_path, kind):
    save_drafter(kind.for_target(target), tmp_path / "drafter", target.identity, {"target": about_target(target)})
    folder = export(tmp_path / "drafter", VLLM("bfloat16"), tmp_path / "served")
    findings = run_checks(LoadedDrafter.load(folder, target), prompts, Serving(), 16)
    assert {"target", "chat template", "context length", "weights", "dtype", "decoding"} <= set(findings)
    assert findings["target"].level is Level.OK and "bfloat16" in findings["dtype"].sentence
