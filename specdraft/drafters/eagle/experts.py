"""GLM-4's mixture of experts in an MTP layer: transformers' own module, and what its tensors are called in files.

E = experts, I = their inner size, H = hidden size, L = the layer's name in a state dict."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

SETTINGS = ["moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group"]
SETTINGS += ["topk_group", "norm_topk_prob", "routed_scaling_factor"]
CORRECTION = "mlp.gate.e_score_correction_bias"  # of the router's choice, kept in fp32; it is not trained
_STACKED = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}


def mixture(hidden_size: int, hidden_act: str, settings: Mapping[str, Any]) -> nn.Module:
    """The module with random weights. settings: those of ``SETTINGS``, by GLM-4's names."""
    config = Glm4MoeConfig(hidden_size=hidden_size, hidden_act=hidden_act, **settings)
    config._experts_implementation = "eager"
    module = Glm4MoeMoE(config)
    for weight in (module.experts.gate_up_proj, module.experts.down_proj, module.gate.weight):
        nn.init.normal_(weight, std=0.02)  # transformers leaves that to the model that it is a part of
    return module


def routed_weights(settings: Mapping[str, Any], hidden_size: int) -> float:
    """Weights of the routed experts that a position passes through."""
    return 3.0 * settings["num_experts_per_tok"] * settings["moe_intermediate_size"] * hidden_size


def published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as files have them: those of experts one by one, ``[I, H]`` and ``[H, I]``."""
    found = {}
    for name, tensor in tensors.items():
        parts = next((parts for stacked, parts in _STACKED.items() if name.endswith(stacked)), None)
        if parts is None:
            found[name] = tensor
            continue
        experts = name.rpartition(".")[0]
        for number, expert in enumerate(tensor):
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{experts}.{number}.{part}.weight"] = weight
    return found


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What ``published`` was made of: ``[E, 2 I, H]`` and ``[E, H, I]``."""
    found, single = {}, {}
    for name, tensor in tensors.items():
        of_expert = re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if of_expert is None:
            found[name] = tensor
        else:
            single[of_expert[1], int(of_expert[2]), of_expert[3]] = tensor
    for layer in dict.fromkeys(experts.removesuffix("mlp.experts") for experts, _, _ in single):
        count = 1 + max(number for _, number, _ in single)
        for name, parts in _STACKED.items():
            experts = f"{layer}mlp.experts"
            found[layer + name] = torch.stack(
                [torch.cat([single[experts, number, part] for part in parts]) for number in range(count)]
            )
    return found
