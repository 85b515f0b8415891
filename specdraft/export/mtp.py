"""The MTP layout: MiMo's, of the layer alone, as vLLM's method ``mtp`` loads it for a target of any architecture.

H = hidden size of layer and target.

- vLLM knows the layer by the architecture, whatever the target's own is, and builds it of Qwen2's parts (biases of
  queries, keys and values, heads that share the width) by the *target's* configuration. That must have a
  ``num_nextn_predict_layers``, as MiMo's has; any other target is told of one when it is started.
- Embedding and projection are the target's, and shared when the layer has been loaded; the loader wants them in the
  file all the same, so they are copied from the target's files.
- A target that vLLM runs as MiMo hands out its last hidden state before the final norm, any other one after it."""

from collections.abc import Mapping
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.drafters.eagle.mtp import ARCHITECTURE, OWN
from specdraft.export.eagle3 import SIZES, check_config, head_config, layer_shapes
from specdraft.export.layout import Layout, cast, check_tensors


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of an ``MTP``. ``target``: what the checkpoint says of it. Raises UserError for an unsound layer."""
    sizes = [key for key in SIZES if key != "draft_vocab_size"]
    config = head_config((ARCHITECTURE, "qwen2"), sizes, drafter.config(), target, dtype)
    config |= {"num_nextn_predict_layers": 1, "use_sliding_window": False}
    check_config(config, sizes)
    tensors = cast({OWN + name.removeprefix("layer."): each for name, each in drafter.state_dict().items()}, dtype)
    check_tensors("an MTP layer", tensors, _shapes(config), dtype)
    before = bool(drafter.config()["layers"])
    facts = {"reads": f"the last hidden state {'before' if before else 'after'} the target's final norm"}
    if before:
        facts["served with"] = f"a target that vLLM runs as {ARCHITECTURE}: the first of its config's architectures"
    borrowed = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    return Layout("mtp", config, tensors, dtype, facts=facts, borrowed=borrowed)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, prefix = config["hidden_size"], OWN.removesuffix(".")
    layer = layer_shapes(dict(config) | {"attention_bias": True}, prefix, h)
    del layer[f"{prefix}.self_attn.o_proj.bias"]
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
    return {**layer, **{f"{OWN}{name}.weight": (h,) for name in norms}, f"{OWN}input_proj.weight": (h, 2 * h)}
