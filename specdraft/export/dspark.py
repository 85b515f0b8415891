"""The DSpark layout: DFlash's with a Markov head and a confidence head, as vLLM's method ``dspark`` loads it.

r = rank, H = hidden size, V = target vocabulary, Vd = draft vocabulary.

- vLLM makes a block of as many slots as tokens are asked for, the anchor's among them, and drafts from every one.
- ``markov_w1`` is looked up by target ids, ``markov_w2`` has a row for each draft id; both are always written.
- The confidence head is read where verification is adaptive, and has a bias there in any case."""

from collections.abc import Mapping
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.export.dflash import block_config, block_tensors, check_block, described
from specdraft.export.eagle3 import LAYERS
from specdraft.export.layout import Layout

ARCHITECTURE = "Qwen3DSparkModel"


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of a ``DSpark``. ``target``: what the checkpoint says of it. Raises UserError for unsound weights."""
    arguments = drafter.config()
    rank, confident = int(arguments["markov_rank"]), bool(arguments["confidence_head"])
    config = block_config(ARCHITECTURE, arguments, target, dtype)
    config |= {
        "sample_from_anchor": True,
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "target_layer_ids": [layer - 1 for layer in config[LAYERS]],
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident,
    }
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (config["vocab_size"], rank),
        "markov_head.markov_w2.weight": (config["draft_vocab_size"], rank),
    }
    if confident:
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    tensors = block_tensors(drafter, dtype)
    check_block("a DSpark drafter", config, tensors, target, shapes)
    return Layout("dspark", config, tensors, dtype, **described(config, config["block_size"]))
