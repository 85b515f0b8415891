"""The layout of speculators: EAGLE-3 and P-EAGLE heads come back, and what vLLM asks of it is there."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.speculators import Speculators

BLOCK = {"layers": [1, 3, 6], "num_layers": 2, "block_size": 4, "mask_token": 7}
FAMILIES = {
    "eagle3": {"num_layers": 2, "norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "p_eagle": {"num_layers": 2, "norm_before_fc": True, "mask_token": 7, "ttt_steps": 8},
    "dflash": BLOCK,
    "dspark": BLOCK | {"markov_rank": 6},
}


@pytest.fixture
def written(make_drafter, save, tmp_path):
    """written(family, **options) -> (drafter, directory, config, tensors)."""

    def write(family, **options):
        drafter = make_drafter(family, **FAMILIES[family] | options)
        directory = export(save(drafter), Speculators(dtype="float32"), tmp_path / "public")
        config = json.loads((directory / "config.json").read_text())
        return drafter, directory, config, load_file(directory / "model.safetensors")

    return write


@pytest.mark.parametrize("family", ["eagle3", "p_eagle"])
def test_heads_come_back_bit_by_bit(written, target, family):
    drafter, directory, _, _ = written(family)
    imported = import_head(directory, target)
    assert type(imported) is type(drafter) and imported.config() | {"ttt_steps": 0} == drafter.config() | {
        "ttt_steps": 0
    }
    assert all(torch.equal(imported.state_dict()[name], value) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_vllm_asks_of_such_a_directory(written, target, family):
    """It refuses a directory without any of these, and starts the target that is named."""
    _, _, config, tensors = written(family)
    said = config["speculators_config"]
    assert said["verifier"] == {"name_or_path": target.identity.name, "architectures": ["LlamaForCausalLM"]}
    longest = {"eagle3": 5, "p_eagle": 8, "dflash": 3, "dspark": 4}[family]
    assert [method["speculative_tokens"] for method in said["proposal_methods"]] == [longest]
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert {"layers.0.self_attn.q_proj.weight", "layers.1.mlp.down_proj.weight"} <= set(tensors)
    assert "layers.1.hidden_norm.weight" not in tensors
    if family in ("dflash", "dspark"):
        assert config["aux_hidden_state_layer_ids"] == [1, 3, 6] and config["mask_token_id"] == 7
        assert config["sample_from_anchor"] is (family == "dspark") and config["sliding_window_non_causal"] is True
    else:
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
        assert (config.get("mask_token_id") == 7) is (family == "p_eagle")


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("dflash", {"causal": True}, "causal within its block"),
        ("p_eagle", {"norm_before_fc": False, "fc_norm": True}, "trained with fc_norm, which vLLM reads of no peagle"),
    ],
)
def test_what_it_has_no_word_for_is_refused(written, family, options, said):
    with pytest.raises(UserError, match=said):
        written(family, **options)
