"""What readers of several families share: sizes of the target, shapes of a layer, the draft vocabulary."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from specdraft.errors import UserError
from specdraft.export.eagle3 import SIZES
from specdraft.onednn import plain
from specdraft.targets import Target


def check_sizes(
    target: Target, config: Mapping[str, Any], keys: Sequence[str], title: str, optional: bool = False
) -> None:
    """Raises UserError where the files of a drafter, ``title`` with its article, are of a target of other sizes.
    ``optional``: keys may be left out."""
    what = title.removeprefix("a ").removeprefix("an ")
    for key in keys:
        found, wanted = config.get(key), getattr(target, key)
        if found != wanted and not (optional and found is None):
            wrong = f"the {what}'{'' if what.endswith('s') else 's'} {key} is {found} and the target's {wanted}"
            raise UserError(f"{wrong}: expected {title} of this target; name its own target")


def refuse_layers(layers: Sequence[int] | None, reads: str) -> None:
    """Raises UserError for layers of the target where there is nothing to choose."""
    if layers is not None:
        raise UserError(f"{reads} no auxiliary layers of the target: expected no --layers; leave them out")


def drop_borrowed(target: Target, tensors: dict[str, Tensor], title: str, prefix: str = "") -> None:
    """Leave out the embedding and projection of ``tensors``, the target's own. Raises UserError if they are not."""
    weights = {f"{prefix}embed_tokens.weight": target.embedding_weight, "lm_head.weight": target.head.weight}
    for name, weight in weights.items():
        own = tensors.pop(name, None)
        if own is not None and not _equal(own, weight):
            wrong = f"{name} in the files is not the target's own, which {title} borrows"
            raise UserError(f"{wrong}: expected the target that it was trained for; name that one")


def share_with(target: Target, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Drop an embedding that is the target's own, and fill in the projection that engines would share."""
    check_sizes(target, config, ("hidden_size", "vocab_size"), "a head")
    own = tensors.get("embed_tokens.weight")
    if own is not None and _equal(own, target.embedding_weight):
        del tensors["embed_tokens.weight"]
    if (config.get("draft_vocab_size") or target.vocab_size) == target.vocab_size:
        tensors.setdefault("lm_head.weight", plain(target.head.weight.detach()).cpu())


def _equal(own: Tensor, weight: Tensor) -> bool:
    theirs = plain(weight.detach())
    return own.shape == theirs.shape and torch.equal(own, theirs.to(own.device, own.dtype))


def layer_shape(config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """A constructor's arguments, read as those of a Qwen3 layer where there is ``qk_norm``, else of Llama's."""
    # transformers knows the defaults of keys that were left out, and every way to write down a rotary embedding.
    known = (*SIZES, "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters")
    known += ("num_hidden_layers", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    given = {key: config[key] for key in known if config.get(key) is not None}
    given = {"num_hidden_layers": 1, **given, "draft_vocab_size": config.get("draft_vocab_size") or target.vocab_size}
    kind = Qwen3Config if config["qk_norm"] else LlamaConfig
    layer = kind(**given | {"max_position_embeddings": target.max_length})
    shape = {key: getattr(layer, key) for key in (*SIZES, "rms_norm_eps", "hidden_act")}
    shape |= {"num_layers": layer.num_hidden_layers, "sliding_window": _window(layer)}
    return shape | {"rope_parameters": dict(layer.rope_parameters)}


def _window(layer: LlamaConfig | Qwen3Config) -> int | None:
    """How many positions attention sees: vLLM asks ``layer_types``, and serves no draft whose layers differ."""
    kinds = set(getattr(layer, "layer_types", None) or ["full_attention"])
    if len(kinds) > 1:
        raise UserError(f"the head's layer_types are {', '.join(sorted(kinds))}: expected layers of one kind")
    return getattr(layer, "sliding_window", None) if kinds == {"sliding_attention"} else None


def fill_vocabulary(tensors: dict[str, Tensor], draft_size: int, vocab_size: int) -> None:
    """d2t as int64 and t2d made from it; a whole vocabulary needs none."""
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if d2t is None and draft_size != vocab_size:
        wrong = f"the head drafts {draft_size} of {vocab_size} tokens and lacks d2t, which says which"
        raise UserError(f"{wrong}: expected a complete head; download it again")
    offsets = torch.zeros(draft_size, dtype=torch.int64) if d2t is None else d2t.to(torch.int64)
    ids = offsets + torch.arange(len(offsets))
    tensors["d2t"] = offsets
    tensors["t2d"] = torch.isin(torch.arange(vocab_size), ids)
