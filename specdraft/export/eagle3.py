"""The plain EAGLE-3 layout that vLLM, SGLang and TensorRT-LLM load.

H = hidden size of head and target, V = target vocabulary, Vd = draft vocabulary, n = auxiliary layers.

- A layer k is the hidden state after k layers. vLLM reads k from the top level; SGLang reads k - 1 from
  ``eagle_config`` and ignores the top level. Side by side, one file serves both. TensorRT-LLM is told when it starts.
- The embedding is the target's: engines share it when the file has none. The lm_head is always the head's own.
- d2t and t2d are left out where the draft vocabulary is the whole one: vLLM has no place for them then.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.export.layout import Layout, cast, check_positive, check_tensors, rope_keys, special_ids

ARCHITECTURE = "LlamaForCausalLMEagle3"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of an ``Eagle3``. ``target``: what the checkpoint says of it. Raises UserError for an unsound head."""
    config = layout_config(drafter.config(), target, dtype)
    tensors = layout_tensors(drafter.state_dict(), config)
    validate(config, tensors, target.get("num_hidden_layers"))
    facts = {
        "auxiliary layers": f"{config['eagle_aux_hidden_state_layer_ids']} (hidden states after so many layers)",
        "draft vocabulary": f"{config['draft_vocab_size']} of {config['vocab_size']} tokens",
    }
    return Layout("eagle3", config, tensors, dtype, facts=facts)


def layout_config(drafter: Mapping[str, Any], target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The head's ``config.json`` from the constructor arguments of an ``Eagle3`` (``Eagle3.config()``)."""
    layers = [int(layer) for layer in drafter["layers"]]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{key: int(drafter[key]) for key in SIZES},
        "num_hidden_layers": 1,
        "hidden_act": drafter["hidden_act"],
        "rms_norm_eps": drafter["rms_norm_eps"],
        **rope_keys(drafter["rope_parameters"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **special_ids(target),
        "eagle_aux_hidden_state_layer_ids": layers,
        "num_aux_hidden_states": len(layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": bool(drafter["fc_norm"]),
        "norm_output": bool(drafter["norm_output"]),
    }


def layout_tensors(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The head's tensors from an ``Eagle3`` state dict."""
    whole_vocabulary = config["draft_vocab_size"] == config["vocab_size"]
    left_out = ("d2t", "t2d") if whole_vocabulary else ()
    return cast({name: tensor for name, tensor in state.items() if name not in left_out}, config["torch_dtype"])


def layer_shapes(config: Mapping[str, Any], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer whose attention reads ``width``, input norms excepted."""
    h, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{prefix}.post_attention_layernorm.weight": (h,),
        f"{prefix}.self_attn.q_proj.weight": (query, width),
        f"{prefix}.self_attn.k_proj.weight": (key, width),
        f"{prefix}.self_attn.v_proj.weight": (key, width),
        f"{prefix}.self_attn.o_proj.weight": (h, query),
        f"{prefix}.mlp.gate_proj.weight": (inner, h),
        f"{prefix}.mlp.up_proj.weight": (inner, h),
        f"{prefix}.mlp.down_proj.weight": (h, inner),
    }


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a head with this ``config.json`` consists of; nothing may be added."""
    h, vocabulary, draft = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    n = len(config["eagle_aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, n * h),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        **layer_shapes(config, "midlayer", 2 * h),
        "norm.weight": (h,),
        "lm_head.weight": (draft, h),
    }
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(n)}
    if draft != vocabulary:
        shapes |= {"d2t": (draft,), "t2d": (vocabulary,)}
    return shapes


def validate(config: Mapping[str, Any], tensors: Mapping[str, Tensor], num_target_layers: int | None = None) -> None:
    """Check all that engines do not check. Raises UserError that names the first fault.

    ``num_target_layers`` bounds the layer ids from above where the checkpoint records it.
    """
    _validate_config(config, num_target_layers)
    shapes = tensor_shapes(config)
    integers = {"d2t": torch.int64, "t2d": torch.bool} if "d2t" in shapes else None
    check_tensors("an EAGLE-3 head", tensors, shapes, config["torch_dtype"], integers)
    if "d2t" in shapes:
        _validate_draft_vocabulary(tensors["d2t"], tensors["t2d"])


def _validate_config(config: Mapping[str, Any], num_target_layers: int | None) -> None:
    layers = config["eagle_aux_hidden_state_layer_ids"]
    last = num_target_layers - 1 if num_target_layers else None
    if not layers or layers != sorted(set(layers)) or layers[0] < 1 or (last is not None and layers[-1] > last):
        raise UserError(
            f"auxiliary layers are {layers}: expected ascending, distinct numbers from 1 to {last or 'L-1'}, "
            "because engines sort and deduplicate them; train with such layers"
        )
    check_positive(config, SIZES)
    if config["draft_vocab_size"] > config["vocab_size"]:
        raise UserError(
            f"the draft vocabulary has {config['draft_vocab_size']} tokens and the target's {config['vocab_size']}: "
            "expected a subset of the target's; restore the checkpoint"
        )
    check_silu(config)


def check_silu(config: Mapping[str, Any]) -> None:
    """Raises UserError for another activation than the one that the engines' Llama layers compute."""
    if config["hidden_act"] != "silu":
        raise UserError(
            f"the drafter's hidden_act is {config['hidden_act']!r}: serving engines know silu only; train with silu"
        )


def _validate_draft_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    ids = torch.arange(d2t.shape[0]) + d2t  # [Vd], d2t holds offsets
    inside = bool((ids >= 0).all() and (ids < t2d.shape[0]).all())
    if not inside or bool((ids.diff() <= 0).any()):
        raise UserError(
            "d2t does not map the draft vocabulary to ascending target ids: expected offsets (target id = i + d2t[i]), "
            "not absolute ids; retrain or restore the checkpoint"
        )
    if not bool(t2d[ids].all()) or int(t2d.sum()) != ids.shape[0]:
        raise UserError("t2d does not mark exactly the target ids that d2t maps to: restore the checkpoint")
