"""The plain EAGLE-3 layout that vLLM, SGLang and TensorRT-LLM load.

H = hidden size of head and target, V = target vocabulary, Vd = draft vocabulary, n = auxiliary layers.

- A layer k is the hidden state after k layers. vLLM reads k from the top level; SGLang reads k - 1 from
  ``eagle_config`` and ignores the top level. Side by side, one file serves both. TensorRT-LLM is told when it starts.
- The embedding is the target's unless the head has its own: engines share it when the file has none. The lm_head is
  always the head's own.
- Norms of queries and keys are Qwen3's, which vLLM has an architecture of its own for.
- The norm before the attention of a further layer is ``input_layernorm`` to vLLM and ``hidden_norm`` to SGLang: both
  are written, alike.
- P-EAGLE is the same head with ``mask_hidden``, in the place of hidden states that are not there yet, and a mask token.
- d2t and t2d are left out where the draft vocabulary is the whole one: vLLM has no place for them then."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.export.layout import Layout, cast, check_positive, check_tensors, rope_keys, special_ids

LAYERS = "eagle_aux_hidden_state_layer_ids"
MASK = "ptd_token_id"  # of a P-EAGLE head: the token in the place of what is drafted
SIZES = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
SIZES += ["draft_vocab_size", "max_position_embeddings"]
LLAMA, QWEN3 = ("LlamaForCausalLMEagle3", "llama"), ("Eagle3Qwen3ForCausalLM", "qwen3")  # architecture, model_type
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # keys of config.json too
# Constructor arguments of ``Eagle3`` that not every engine computes, and what they are in the head of the paper.
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(_FLAGS, False),
    **dict.fromkeys(("qk_norm", "attention_bias", "own_embedding"), False),
    "num_layers": 1,
    "sliding_window": None,
}


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of an ``Eagle3``. ``target``: what the checkpoint says of it. Raises UserError for an unsound head."""
    arguments = drafter.config()
    config = layout_config(arguments, target, dtype)
    tensors = layout_tensors(drafter.state_dict(), config)
    validate(config, tensors, target.get("num_hidden_layers"))
    used = {name: arguments[name] for name, usual in OPTIONS.items() if arguments[name] != usual}
    facts = {
        "auxiliary layers": f"{config[LAYERS]} (hidden states after so many layers)",
        "draft vocabulary": f"{config['draft_vocab_size']} of {config['vocab_size']} tokens",
    }
    if used:
        facts["options"] = ", ".join(f"{name}={str(value).lower()}" for name, value in used.items())
    if MASK in config:
        facts["masks"] = f"token {config[MASK]}, trained for drafts of up to {arguments['ttt_steps']} tokens"
        return Layout("p_eagle", config, tensors, dtype, facts=facts, longest_draft=int(arguments["ttt_steps"]))
    return Layout("eagle3", config, tensors, dtype, facts=facts, options=tuple(used))


def head_config(
    names: tuple[str, str], sizes: Sequence[str], drafter: Mapping[str, Any], target: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """What ``config.json`` says of a head of either EAGLE. names: its architecture and model_type; ``drafter``: its
    constructor's arguments."""
    return {
        "architectures": [names[0]],
        "model_type": names[1],
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
        **head_config(QWEN3 if drafter["qk_norm"] else LLAMA, SIZES, drafter, target, dtype),
        "num_hidden_layers": int(drafter["num_layers"]),
        "attention_bias": bool(drafter["attention_bias"]),
        **_window_keys(drafter),
        LAYERS: layers,
        "num_aux_hidden_states": len(layers),
        "eagle_config": {LAYERS: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
        **{name: bool(drafter[name]) for name in _FLAGS},
        **({MASK: int(drafter["mask_token"])} if "mask_token" in drafter else {}),
    }


def _window_keys(drafter: Mapping[str, Any]) -> dict[str, Any]:
    if drafter["sliding_window"] is None:
        return {}
    layers = ["sliding_attention"] * int(drafter["num_layers"])
    return {"sliding_window": int(drafter["sliding_window"]), "use_sliding_window": True, "layer_types": layers}


def layout_tensors(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The head's tensors from an ``Eagle3`` state dict."""
    left_out = ("d2t", "t2d") if config["draft_vocab_size"] == config["vocab_size"] else ()
    tensors = {published_name(name): tensor for name, tensor in state.items() if name not in left_out}
    norms = {name for name in tensors if re.fullmatch(r"layers\.\d+\.input_layernorm\.weight", name)}
    tensors |= {name.replace("input_layernorm", "hidden_norm"): tensors[name].clone() for name in norms}
    return cast(tensors, config["torch_dtype"])


def published_name(name: str) -> str:
    """What engines call a tensor of an ``Eagle3`` state dict: they count the first layer too."""
    return re.sub(r"^later\.(\d+)\.", lambda found: f"layers.{int(found[1]) + 1}.", name)


def layer_shapes(config: Mapping[str, Any], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer whose attention reads ``width``, input norms excepted."""
    h, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    more: dict[str, tuple[int, ...]] = {}
    if config["attention_bias"]:
        rows = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": h}
        more |= {f"{prefix}.self_attn.{name}.bias": (size,) for name, size in rows.items()}
    if config["model_type"] == QWEN3[1]:
        more |= {f"{prefix}.self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
    return {
        **more,
        f"{prefix}.post_attention_layernorm.weight": (h,),
        f"{prefix}.self_attn.q_proj.weight": (query, width),
        f"{prefix}.self_attn.k_proj.weight": (key, width),
        f"{prefix}.self_attn.v_proj.weight": (key, width),
        f"{prefix}.self_attn.o_proj.weight": (h, query),
        f"{prefix}.mlp.gate_proj.weight": (inner, h),
        f"{prefix}.mlp.up_proj.weight": (inner, h),
        f"{prefix}.mlp.down_proj.weight": (h, inner),
    }


def _tensor_shapes(config: Mapping[str, Any], own_embedding: bool) -> dict[str, tuple[int, ...]]:
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
    for layer in range(1, config["num_hidden_layers"]):
        norms = ("hidden_norm", "input_layernorm")
        shapes |= {f"layers.{layer}.{name}.weight": (h,) for name in norms}
        shapes |= layer_shapes(config, f"layers.{layer}", h)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(n)}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (n * h,)
    if MASK in config:
        shapes["mask_hidden"] = (1, 1, n * h)
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocabulary, h)
    if draft != vocabulary:
        shapes |= {"d2t": (draft,), "t2d": (vocabulary,)}
    return shapes


def validate(config: Mapping[str, Any], tensors: Mapping[str, Tensor], num_target_layers: int | None = None) -> None:
    """Check all that engines do not check. Raises UserError that names the first fault.
    ``num_target_layers`` bounds the layer ids from above where the checkpoint records it."""
    check_layers(config[LAYERS], num_target_layers)
    check_config(config, SIZES)
    shapes = _tensor_shapes(config, "embed_tokens.weight" in tensors)
    check_tensors("an EAGLE-3 head", tensors, shapes, config["torch_dtype"], vocabulary_dtypes(config))
    check_vocabulary(tensors)


def check_layers(layers: Sequence[int], last: int | None) -> None:
    """Raises UserError for auxiliary layers that engines would read otherwise. last: the target's, if it is known."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or (last and layers[-1] > last):
        raise UserError(
            f"auxiliary layers are {layers}: expected ascending, distinct numbers from 1 to {last or 'L'}, "
            "because engines sort and deduplicate them; train with such layers"
        )


def vocabulary_dtypes(config: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Of d2t and t2d, which a draft vocabulary that is not the whole one has. Raises UserError if it is larger."""
    draft, whole = config["draft_vocab_size"], config["vocab_size"]
    if draft > whole:
        wrong = f"the draft vocabulary has {draft} tokens and the target's {whole}"
        raise UserError(f"{wrong}: expected a subset of the target's; restore the checkpoint")
    return {"d2t": torch.int64, "t2d": torch.bool} if draft != whole else {}


def refuse_last_layer(layout: Layout, target: Mapping[str, Any], engine: str) -> None:
    """Raises UserError where ``engine`` would be asked for the output of the target's last layer."""
    layers, last = layout.config[LAYERS], target.get("num_hidden_layers")
    if last is not None and layers[-1] == last:
        wrong = f"the head reads the target's layers {layers}, and {engine} does not hand out the last one, {last}"
        raise UserError(f"{wrong}: expected layers below it; train with such model.drafter.layers, or export for vllm")


def check_config(config: Mapping[str, Any], sizes: Sequence[str]) -> None:
    """Raises UserError for a size or an activation that the engines' Llama layers do not compute."""
    check_positive(config, sizes)
    if config["hidden_act"] != "silu":
        wrong = f"the drafter's hidden_act is {config['hidden_act']!r}"
        raise UserError(f"{wrong}: expected silu, which serving engines know; train with it")


def check_vocabulary(tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError unless d2t and t2d, where they are, say the same."""
    if "d2t" not in tensors:
        return
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    ids = torch.arange(d2t.shape[0]) + d2t  # [Vd], d2t holds offsets
    if (ids < 0).any() or (ids >= t2d.shape[0]).any() or (ids.diff() <= 0).any():
        raise UserError(
            "d2t does not map the draft vocabulary to ascending target ids: expected offsets (target id = i + d2t[i]), "
            "not absolute ids; retrain or restore the checkpoint"
        )
    if not t2d[ids].all() or int(t2d.sum()) != len(ids):
        raise UserError("t2d does not mark exactly the target ids that d2t maps to: restore the checkpoint")
