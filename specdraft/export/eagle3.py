"""The plain EAGLE-3 layout that vLLM, SGLang and TensorRT-LLM load.

H = hidden size of head and target, V = target vocabulary, Vd = draft vocabulary, n = auxiliary layers.

- A layer k is the hidden state after k layers. vLLM reads k from the top level; SGLang reads k - 1 from
  ``eagle_config`` and ignores the top level. Side by side, one file serves both. TensorRT-LLM is told when it starts.
- The embedding is the target's: engines share it when the file has none. The lm_head is always the head's own.
- d2t and t2d are left out where the draft vocabulary is the whole one: vLLM has no place for them then."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.export.layout import Layout, cast, check_positive, check_tensors, rope_keys, special_ids

LAYERS = "eagle_aux_hidden_state_layer_ids"
SIZES = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
SIZES += ["draft_vocab_size", "max_position_embeddings"]


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of an ``Eagle3``. ``target``: what the checkpoint says of it. Raises UserError for an unsound head."""
    config = layout_config(drafter.config(), target, dtype)
    tensors = layout_tensors(drafter.state_dict(), config)
    validate(config, tensors, target.get("num_hidden_layers"))
    facts = {
        "auxiliary layers": f"{config[LAYERS]} (hidden states after so many layers)",
        "draft vocabulary": f"{config['draft_vocab_size']} of {config['vocab_size']} tokens",
    }
    return Layout("eagle3", config, tensors, dtype, facts=facts)


def head_config(
    architecture: str, sizes: Sequence[str], drafter: Mapping[str, Any], target: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """What ``config.json`` says of a head of either EAGLE; ``drafter``: its constructor's arguments."""
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **{key: int(drafter[key]) for key in sizes},
        "num_hidden_layers": 1,
        "hidden_act": drafter["hidden_act"],
        "rms_norm_eps": drafter["rms_norm_eps"],
        **rope_keys(drafter["rope_parameters"]),
        **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False),
        "torch_dtype": dtype,
        **special_ids(target),
    }


def layout_config(drafter: Mapping[str, Any], target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The head's ``config.json`` from the constructor arguments of an ``Eagle3`` (``Eagle3.config()``)."""
    layers = [int(layer) for layer in drafter["layers"]]
    return {
        **head_config("LlamaForCausalLMEagle3", SIZES, drafter, target, dtype),
        LAYERS: layers,
        "num_aux_hidden_states": len(layers),
        "eagle_config": {LAYERS: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": bool(drafter["fc_norm"]),
        "norm_output": bool(drafter["norm_output"]),
    }


def layout_tensors(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The head's tensors from an ``Eagle3`` state dict."""
    left_out = ("d2t", "t2d") if config["draft_vocab_size"] == config["vocab_size"] else ()
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


def _tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a head with this ``config.json`` consists of; nothing may be added."""
    h, vocabulary, draft, n = (
        config["hidden_size"],
        config["vocab_size"],
        config["draft_vocab_size"],
        len(config[LAYERS]),
    )
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
    ``num_target_layers`` bounds the layer ids from above where the checkpoint records it."""
    layers, draft, whole = config[LAYERS], config["draft_vocab_size"], config["vocab_size"]
    last = num_target_layers - 1 if num_target_layers else None
    if not layers or layers != sorted(set(layers)) or layers[0] < 1 or (last is not None and layers[-1] > last):
        raise UserError(
            f"auxiliary layers are {layers}: expected ascending, distinct numbers from 1 to {last or 'L-1'}, "
            "because engines sort and deduplicate them; train with such layers"
        )
    check_config(config, SIZES)
    if draft > whole:
        wrong = f"the draft vocabulary has {draft} tokens and the target's {whole}"
        raise UserError(f"{wrong}: expected a subset of the target's; restore the checkpoint")
    integers = {"d2t": torch.int64, "t2d": torch.bool} if draft != whole else {}
    check_tensors("an EAGLE-3 head", tensors, _tensor_shapes(config), config["torch_dtype"], integers)
    if integers:
        _validate_draft_vocabulary(tensors["d2t"], tensors["t2d"])


def check_config(config: Mapping[str, Any], sizes: Sequence[str]) -> None:
    """Raises UserError for a size or an activation that the engines' Llama layers do not compute."""
    check_positive(config, sizes)
    if config["hidden_act"] != "silu":
        wrong = f"the drafter's hidden_act is {config['hidden_act']!r}"
        raise UserError(f"{wrong}: expected silu, which serving engines know; train with it")


def _validate_draft_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    ids = torch.arange(d2t.shape[0]) + d2t  # [Vd], d2t holds offsets
    if (ids < 0).any() or (ids >= t2d.shape[0]).any() or (ids.diff() <= 0).any():
        raise UserError(
            "d2t does not map the draft vocabulary to ascending target ids: expected offsets (target id = i + d2t[i]), "
            "not absolute ids; retrain or restore the checkpoint"
        )
    if not t2d[ids].all() or int(t2d.sum()) != len(ids):
        raise UserError("t2d does not mark exactly the target ids that d2t maps to: restore the checkpoint")
