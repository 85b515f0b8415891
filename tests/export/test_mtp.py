"""An MTP layer as vLLM loads it: MiMo's names, and beside them what is the target's."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from specdraft.drafters.eagle.mtp_layouts import LAYOUTS
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.vllm import VLLM

OWN = LAYOUTS["mimo"].prefix


def test_the_file_holds_the_layer_and_what_the_target_lends(target, make_drafter, save, tmp_path):
    layer = make_drafter("mtp")
    directory = export(save(layer), VLLM(dtype="float32"), tmp_path / "served")
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    assert (config["architectures"], config["model_type"]) == (["MiMoForCausalLM"], "qwen2")
    assert config["num_nextn_predict_layers"] == 1 and "eagle_config" not in config
    assert torch.equal(tensors.pop("model.embed_tokens.weight"), target.embedding_weight)
    assert torch.equal(tensors.pop("lm_head.weight"), target.head.weight)
    ours = {OWN + name.removeprefix("layer."): tensor for name, tensor in layer.state_dict().items()}
    assert tensors.keys() == ours.keys() and all(torch.equal(tensors[name], ours[name]) for name in ours)
    assert "o_proj.bias" not in " ".join(tensors) and f"{OWN}self_attn.q_proj.bias" in tensors
    card = (directory / "README.md").read_text()
    assert "--hf-overrides '{\"num_nextn_predict_layers\": 1}'" in card and "after the target's final norm" in card


def test_a_layer_that_reads_before_the_norm_says_whom_it_is_for(make_drafter, save, tmp_path):
    directory = export(save(make_drafter("mtp", before_norm=True)), VLLM(), tmp_path / "served")
    card = (directory / "README.md").read_text()
    assert "before the target's final norm" in card and "a target that vLLM runs as MiMoForCausalLM" in card


def test_nothing_is_written_without_the_targets_files(target, make_drafter, save, tmp_path):
    checkpoint, output = save(make_drafter("mtp")), tmp_path / "served"
    config = json.loads((checkpoint / "config.json").read_text())
    gone = tmp_path / "gone"
    gone.mkdir()
    shutil.copy(f"{target.identity.name}/config.json", gone)
    config["target"]["name"] = str(gone)
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"has no model.safetensors: expected its weights as safetensors"):
        export(checkpoint, VLLM(), output)
    assert not output.exists()
