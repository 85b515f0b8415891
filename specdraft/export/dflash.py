"""The DFlash layout: that of the published block drafters, as vLLM's method ``dflash`` loads it; DSpark's has more.

H = hidden size of drafter and target, V = target vocabulary, Vd = draft vocabulary, n = auxiliary layers.

- A layer k is the hidden state after k layers: vLLM's top-level key. ``dflash_config`` counts from 0, k - 1, as the
  published files do; both are written.
- The embedding is the target's, which engines share when the file has none; the projection is always written.
- The mask is a token of the target's, whose embedding stands at every slot but the first.
- vLLM drafts with as many masks as tokens are asked for, so that a block may be shorter than in training, never
  longer."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.export.eagle3 import (
    LAYERS,
    SIZES,
    check_config,
    check_layers,
    check_vocabulary,
    head_config,
    layer_shapes,
    vocabulary_dtypes,
)
from specdraft.export.layout import Layout, cast, check_tensors

ARCHITECTURE, MODEL_TYPE = "DFlashDraftModel", "qwen3"


def layout(drafter: Drafter, target: Mapping[str, Any], dtype: str) -> Layout:
    """The files of a ``DFlash``. ``target``: what the checkpoint says of it. Raises UserError for unsound weights."""
    config = block_config(ARCHITECTURE, drafter.config(), target, dtype)
    tensors = block_tensors(drafter, dtype)
    check_block("a DFlash drafter", config, tensors, target, {})
    return Layout("dflash", config, tensors, dtype, **described(config, config["block_size"] - 1))


def block_tensors(drafter: Drafter, dtype: str) -> dict[str, Tensor]:
    """The drafter's tensors by vLLM's names; of a whole vocabulary without the tables of a pruned one."""
    state = {name.replace("blocks.", "layers.", 1): tensor for name, tensor in drafter.state_dict().items()}
    whole = len(state["d2t"]) == len(state["t2d"])
    return cast({name: tensor for name, tensor in state.items() if not (whole and name in ("d2t", "t2d"))}, dtype)


def check_block(
    kind: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: Mapping[str, Any],
    further: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises UserError for unsound weights; ``further``: shapes beside those of DFlash."""
    check_layers(config[LAYERS], target.get("num_hidden_layers"))
    check_config(config, SIZES)
    check_tensors(kind, tensors, _shapes(config) | dict(further), config["torch_dtype"], vocabulary_dtypes(config))
    check_vocabulary(tensors)


def described(config: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """What a ``Layout`` says beside its files: facts of the card and the longest draft."""
    facts = {
        "auxiliary layers": f"{config[LAYERS]} (hidden states after so many layers)",
        "draft vocabulary": f"{config['draft_vocab_size']} of {config['vocab_size']} tokens",
        "block": f"{config['block_size']} slots, so at most {longest} drafted tokens, trained so",
    }
    return {"facts": facts, "longest_draft": longest}


def block_config(
    architecture: str, drafter: Mapping[str, Any], target: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """``config.json`` of a drafter with these constructor's arguments. Raises UserError for a mask that is no token."""
    layers = [int(layer) for layer in drafter["layers"]]
    mask, causal = int(drafter["mask_token"]), bool(drafter["causal"])
    if not 0 <= mask < int(drafter["vocab_size"]):
        raise UserError(f"the drafter's mask_token is {mask}: expected a token of the target; restore the checkpoint")
    return {
        **head_config((architecture, MODEL_TYPE), SIZES, drafter, target, dtype),
        "num_hidden_layers": int(drafter["num_layers"]),
        "block_size": int(drafter["block_size"]),
        LAYERS: layers,
        "num_target_layers": target.get("num_hidden_layers"),
        "dflash_config": {
            "mask_token_id": mask,
            "target_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
            "causal": causal,
        },
    }


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, draft, vocabulary = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(config[LAYERS]) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (draft, h),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"layers.{layer}", h)
        shapes[f"layers.{layer}.input_layernorm.weight"] = (h,)
    if draft != vocabulary:
        shapes |= {"d2t": (draft,), "t2d": (vocabulary,)}
    return shapes
