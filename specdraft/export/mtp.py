"""The MTP layout: of the layer alone, by the names that a target of its kind has, as vLLM's method ``mtp`` loads it.

H = hidden size of layer and target.

- vLLM knows the layer by the architecture. MiMo's it loads for a target of any architecture and builds it of Qwen2's
  parts (biases of queries, keys and values, heads that share the width) by the *target's* configuration. That must have
  a ``num_nextn_predict_layers``, as MiMo's and GLM-4-MoE's have; any other target is told of one when it is started.
- Embedding and projection are the target's, and shared when the layer has been loaded; the loader wants them in the
  file all the same, so they are copied from the target's files.
- A target that vLLM runs as MiMo hands out its last hidden state before the final norm, any other one after it."""

from collections.abc import Mapping
from typing import Any

from specdraft.drafters.eagle.experts import CORRECTION, SETTINGS
from specdraft.drafters.eagle.mtp import MTP
from specdraft.drafters.eagle.mtp_layouts import USUAL
from specdraft.export.eagle3 import SIZES, check_config, head_config, layer_shapes
from specdraft.export.layout import Layout, cast, check_tensors

_SIZES = [key for key in SIZES if key != "draft_vocab_size"]
_NORMS = ("token_layernorm", "hidden_layernorm", "layer.input_layernorm", "final_layernorm")


def layout(drafter: MTP, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of an ``MTP``. ``target``: what the checkpoint says of it. Raises UserError for an unsound layer."""
    arguments, own = drafter.config(), drafter.layout
    config = head_config((own.architecture, "qwen2"), _SIZES, arguments, target, dtype)
    config |= {"num_nextn_predict_layers": 1, "use_sliding_window": False}
    check_config(config, _SIZES)
    layers = int(target.get("num_hidden_layers", 0))  # a MiMo's tensors have the same names for any number
    shapes = {own.published(name, layers): shape for name, shape in _shapes(config, arguments).items()}
    if arguments["experts"] is not None:
        config |= _glm(arguments, layers)
    tensors = drafter.published(layers)
    kept = {name: tensor for name, tensor in tensors.items() if name.endswith(CORRECTION)}  # in fp32
    tensors = cast(tensors, dtype) | cast(kept, "float32")
    check_tensors("an MTP layer", tensors, shapes, dtype, {name: tensor.dtype for name, tensor in kept.items()})
    before = bool(arguments["layers"])
    facts = {"reads": f"the last hidden state {'before' if before else 'after'} the target's final norm"}
    if before or arguments["layout"] != USUAL:
        facts["served with"] = f"a target that vLLM runs as {own.architecture}: the first of its config's architectures"
    borrowed = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    return Layout("mtp", config, tensors, dtype, facts=facts, borrowed=borrowed)


def _glm(arguments: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What a GLM-4-MoE's ``config.json`` says beside the sizes."""
    return {
        "model_type": "glm4_moe",
        "num_hidden_layers": layers,
        "first_k_dense_replace": 0,
        "attention_bias": bool(arguments["attention_bias"]),
        "use_qk_norm": bool(arguments["qk_norm"]),
        "partial_rotary_factor": arguments["rotated"],
        **{name: arguments["experts"][name] for name in SETTINGS},
    }


def _shapes(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """By the names of ``MTP``, experts one by one."""
    h, experts = config["hidden_size"], arguments["experts"]
    kinds = {"attention_bias": arguments["attention_bias"], "model_type": "qwen3" if arguments["qk_norm"] else "qwen2"}
    layer = layer_shapes(dict(config) | kinds, "layer", h)
    layer.pop("layer.self_attn.o_proj.bias", None)
    if experts is not None:
        layer = {name: shape for name, shape in layer.items() if ".mlp." not in name}
        layer |= {"layer.mlp.gate.weight": (experts["n_routed_experts"], h)}
        layer |= {f"layer.{CORRECTION}": (experts["n_routed_experts"],)}
        inner = experts["moe_intermediate_size"]
        for number in range(experts["n_routed_experts"]):
            layer |= _mlp(f"layer.mlp.experts.{number}", inner, h)
        layer |= _mlp("layer.mlp.shared_experts", inner * experts["n_shared_experts"], h)
    return {**layer, **{f"{name}.weight": (h,) for name in _NORMS}, "input_proj.weight": (h, 2 * h)}


def _mlp(name: str, inner: int, h: int) -> dict[str, tuple[int, ...]]:
    wide: dict[str, tuple[int, ...]] = {f"{name}.{part}.weight": (inner, h) for part in ("gate_proj", "up_proj")}
    return wide | {f"{name}.down_proj.weight": (h, inner)}
