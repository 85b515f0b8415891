"""The Medusa layout that vLLM and TensorRT-LLM load: the names and the file of Medusa's own repository.

H = hidden size, V = vocabulary. Head h is ``{h}.{l}.linear.{weight,bias}`` for its residual blocks l, then
``{h}.{L}.weight [V, H]`` for its projection.

- vLLM drops the biases without a word unless ``medusa_fc_bias`` is true.
- vLLM takes any key with "num" and "heads" for the number of heads, and any with "num" and "layers" for that of
  blocks, so that a ``num_attention_heads`` would build another model: the file says nothing else.
- No engine maps a draft vocabulary for heads with projections of their own (vLLM fails on a ``token_map``), and rows of
  zeros would be drafted wherever all true logits are negative. So the vocabulary has to be the whole one."""

from collections.abc import Mapping
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.export.layout import Layout, cast, check_positive, check_tensors

WEIGHTS = "medusa_lm_head.safetensors"


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of a ``Medusa``. ``target``: what the checkpoint says of it. Raises UserError for unsound heads."""
    options = drafter.config()
    vocabulary = options["vocab_size"]
    if options["draft_vocab_size"] != vocabulary:
        wrong = f"the Medusa heads have a draft vocabulary of {options['draft_vocab_size']} of {vocabulary} tokens"
        raise UserError(f"{wrong}, which no engine serves: expected all; train with model.draft_vocab_size=null")
    heads, blocks = int(options["num_heads"]), int(options["num_layers"])
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": int(options["hidden_size"]),
        "vocab_size": vocabulary,
        "medusa_num_heads": heads,
        "num_medusa_heads": heads,  # TensorRT-LLM's name for it
        "medusa_num_layers": blocks,
        "medusa_fc_bias": True,
        "torch_dtype": dtype,
    }
    check_positive(config, ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size"))
    tensors = cast({_published_name(name, blocks): tensor for name, tensor in drafter.state_dict().items()}, dtype)
    check_tensors("Medusa heads", tensors, _tensor_shapes(config), dtype)
    facts = {"heads": f"{heads}, with {blocks} residual block{'s' if blocks > 1 else ''} each"}
    return Layout("medusa", config, tensors, dtype, WEIGHTS, facts, longest_draft=heads)


def _tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, blocks = config["hidden_size"], config["medusa_num_layers"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config["medusa_num_heads"]):
        for block in range(blocks):
            shapes |= {f"{head}.{block}.linear.weight": (h, h), f"{head}.{block}.linear.bias": (h,)}
        shapes[f"{head}.{blocks}.weight"] = (config["vocab_size"], h)
    return shapes


def _published_name(name: str, blocks: int) -> str:
    # blocks.{h}.layers.{l}.weight and lm_heads.{h}.weight are ours; anything else is refused by its own name.
    match name.split("."):
        case ["blocks", head, "layers", block, kind]:
            return f"{head}.{block}.linear.{kind}"
        case ["lm_heads", head, "weight"]:
            return f"{head}.{blocks}.weight"
    return name
