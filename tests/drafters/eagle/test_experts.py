"""A mixture of experts by its tensors: stacked in a module, one by one in files."""

import torch

from specdraft.drafters.eagle.experts import mixture, published, routed_weights, stacked

SETTINGS = {"moe_intermediate_size": 6, "n_routed_experts": 3, "num_experts_per_tok": 2, "n_shared_experts": 1}
SETTINGS |= {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}


def test_files_have_experts_one_by_one():
    state = {f"layer.mlp.{name}": each for name, each in mixture(8, "silu", SETTINGS).state_dict().items()}
    files = published(state)
    both = state["layer.mlp.experts.gate_up_proj"][2]  # [2 I, H]
    assert torch.equal(files["layer.mlp.experts.2.gate_proj.weight"], both[:6])
    assert torch.equal(files["layer.mlp.experts.2.up_proj.weight"], both[6:])
    assert files["layer.mlp.experts.0.down_proj.weight"].shape == (8, 6)
    again = stacked(files)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)


def test_a_position_passes_through_some_of_them():
    module = mixture(8, "silu", SETTINGS)
    weights = sum(parameter.numel() for parameter in module.experts.parameters())
    assert routed_weights(SETTINGS, 8) == weights * 2 / 3
