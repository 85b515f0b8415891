"""The plain EAGLE-3 layout that vLLM and SGLang both load.

H = hidden size of head and target, V = target vocabulary, Vd = draft vocabulary, n = auxiliary layers.

- Engines hardly check a head: with shifted layer ids, no d2t or no lm_head they load it, stay lossless and accept
  nothing. So everything that could go wrong silently is validated here, before writing.
- A layer k is the hidden state after k layers. vLLM reads k from the top level; SGLang reads k - 1 from
  ``eagle_config`` and ignores the top level. Side by side, one file serves both.
- The embedding is the target's: engines share it when the file has none. The lm_head is always the head's own.
- d2t and t2d are left out where the draft vocabulary is the whole one: vLLM has no place for them then.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdraft.errors import UserError

ARCHITECTURE = "LlamaForCausalLMEagle3"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INTEGERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)


def layout_config(
    drafter: Mapping[str, Any], dtype: str, special_ids: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The head's ``config.json`` from the constructor arguments of an ``Eagle3`` (``Eagle3.config()``).

    ``special_ids`` are the target's bos, eos and pad ids, carried over where they are known.
    """
    layers = [int(layer) for layer in drafter["layers"]]
    rope = dict(drafter["rope_parameters"])
    theta = rope.pop("rope_theta")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{key: int(drafter[key]) for key in _INTEGERS},
        "num_hidden_layers": 1,
        "hidden_act": drafter["hidden_act"],
        "rms_norm_eps": drafter["rms_norm_eps"],
        "rope_theta": theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **{key: value for key, value in (special_ids or {}).items() if value is not None},
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
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    return config


def layout_tensors(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The head's tensors from an ``Eagle3`` state dict, weights cast to the layout's dtype."""
    dtype = DTYPES[config["torch_dtype"]]
    whole_vocabulary = config["draft_vocab_size"] == config["vocab_size"]
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in state.items()
        if not (whole_vocabulary and name in ("d2t", "t2d"))
    }


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a head with this ``config.json`` consists of; nothing may be added."""
    h, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    vocabulary, draft = config["vocab_size"], config["draft_vocab_size"]
    n = len(config["eagle_aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, n * h),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * h),
        "midlayer.self_attn.k_proj.weight": (key, 2 * h),
        "midlayer.self_attn.v_proj.weight": (key, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, query),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
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
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        raise UserError(
            f"the head's tensors are not those of an EAGLE-3 head (missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}): expected a checkpoint that specdraft wrote, unedited"
        )
    dtypes = dict.fromkeys(shapes, DTYPES[config["torch_dtype"]]) | {"d2t": torch.int64, "t2d": torch.bool}
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtypes[name]:
            raise UserError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}: expected {dtypes[name]} {list(shape)}; "
                "the checkpoint's config.json and model.safetensors do not belong together"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"tensor {name} holds values that are not finite in {config['torch_dtype']}: "
                "expected finite weights; export an earlier checkpoint, or with engine.dtype=float32"
            )
    if "d2t" in shapes:
        _validate_draft_vocabulary(tensors["d2t"], tensors["t2d"])


def _validate_config(config: Mapping[str, Any], num_target_layers: int | None) -> None:
    layers = config["eagle_aux_hidden_state_layer_ids"]
    last = num_target_layers - 1 if num_target_layers else None
    if not layers or layers != sorted(set(layers)) or layers[0] < 1 or (last is not None and layers[-1] > last):
        raise UserError(
            f"auxiliary layers are {layers}: expected ascending, distinct numbers from 1 to {last or 'L-1'}, "
            "because engines sort and deduplicate them"
        )
    for key in _INTEGERS:
        if config[key] < 1:
            raise UserError(f"the drafter's {key} is {config[key]}: expected a positive number")
    if config["draft_vocab_size"] > config["vocab_size"]:
        raise UserError(
            f"the draft vocabulary has {config['draft_vocab_size']} tokens and the target's {config['vocab_size']}: "
            "expected a subset of the target's"
        )
    if config["hidden_act"] != "silu":
        raise UserError(f"the drafter's hidden_act is {config['hidden_act']!r}: serving engines know silu only")


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
