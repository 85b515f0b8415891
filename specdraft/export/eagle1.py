"""The EAGLE-1 layout, as published and as vLLM's method ``eagle`` loads it.

H = hidden size of head and target. Embedding and LM head are the target's: engines share both when the file has
neither. vLLM knows the head by the architecture of its layer (LlamaForCausalLM becomes EagleLlamaForCausalLM) and
samples drafts with its ``logit_scale``; SGLang wants a name of its own and a bias (``sglang.py``)."""

from collections.abc import Mapping
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.export.eagle3 import SIZES, check_config, head_config, layer_shapes
from specdraft.export.layout import Layout, cast, check_tensors


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of an ``Eagle``. ``target``: what the checkpoint says of it. Raises UserError for an unsound head."""
    sizes = [key for key in SIZES if key != "draft_vocab_size"]
    config = head_config(("LlamaForCausalLM", "llama"), sizes, drafter.config(), target, dtype)
    check_config(config, sizes)
    config |= {"logit_scale": scale} if (scale := target.get("logit_scale", 1.0)) != 1.0 else {}
    state = drafter.state_dict()
    tensors = cast({name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}, dtype)
    h = config["hidden_size"]
    shapes = {"fc.weight": (h, 2 * h), **layer_shapes(config, "layers.0", h)}
    check_tensors("an EAGLE head", tensors, shapes, dtype)
    return Layout("eagle", config, tensors, dtype)
