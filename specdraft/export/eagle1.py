"""The EAGLE-1 layout, as published and as vLLM's method ``eagle`` loads it.

H = hidden size of head and target. Embedding and LM head are the target's: engines share both when the file has
neither. vLLM knows the head by the architecture of its layer (LlamaForCausalLM becomes EagleLlamaForCausalLM); SGLang
wants a name of its own and a bias (``sglang.py``).
"""

from collections.abc import Mapping
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.export.eagle3 import SIZES as EAGLE3_SIZES
from specdraft.export.eagle3 import check_silu, layer_shapes
from specdraft.export.layout import Layout, cast, check_positive, check_tensors, rope_keys, special_ids

_SIZES = tuple(key for key in EAGLE3_SIZES if key != "draft_vocab_size")


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of an ``Eagle``. ``target``: what the checkpoint says of it. Raises UserError for an unsound head."""
    options = drafter.config()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: int(options[key]) for key in _SIZES},
        "num_hidden_layers": 1,
        "hidden_act": options["hidden_act"],
        "rms_norm_eps": options["rms_norm_eps"],
        **rope_keys(options["rope_parameters"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **special_ids(target),
    }
    check_positive(config, _SIZES)
    check_silu(config)
    tensors = cast({_published_name(name): tensor for name, tensor in drafter.state_dict().items()}, dtype)
    shapes = {"fc.weight": (config["hidden_size"], 2 * config["hidden_size"])}
    check_tensors("an EAGLE head", tensors, shapes | layer_shapes(config, "layers.0", config["hidden_size"]), dtype)
    return Layout("eagle", config, tensors, dtype)


def _published_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")
