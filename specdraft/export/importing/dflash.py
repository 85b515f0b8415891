"""Public DFlash and DSpark drafters: the plain layout that vLLM loads, and that of speculators.

Layers see the whole block, unless the plain layout says ``causal``. speculators trains layers of full attention so
whatever its ``sliding_window_non_causal`` says, which is of windows alone; vLLM 0.32 takes that key for all layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.dflash import DFlash, DSpark
from specdraft.errors import UserError
from specdraft.export.eagle3 import LAYERS, check_vocabulary
from specdraft.export.importing.shared import fill_vocabulary, layer_shape, share_with
from specdraft.export.layout import check_tensors
from specdraft.targets import Target
from specdraft.targets.sizes import at_most

_SPARE = 64  # weights that a constructor makes and drops
_BLOCK = 16  # slots of a plain DFlash that does not say how many: those of the published ones
_INTEGERS = {"d2t": torch.int64, "t2d": torch.bool}


def read_dflash(
    published: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target, layers: Sequence[int] | None
) -> DFlash:
    """The drafter of these files, weights in fp32, bound to ``target``. ``layers``: see ``import_head``. Raises
    UserError for files of another target, or of a drafter that ours does not represent."""
    return _read(DFlash, "a DFlash drafter", published, tensors, target, layers)


def read_dspark(
    published: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target, layers: Sequence[int] | None
) -> DFlash:
    """As ``read_dflash``, of a ``DSpark``."""
    return _read(DSpark, "a DSpark drafter", published, tensors, target, layers)


def _read(
    kind: type[DFlash],
    title: str,
    published: Mapping[str, Any],
    files: Mapping[str, Tensor],
    target: Target,
    layers: Sequence[int] | None,
) -> DFlash:
    config = _flat(published)
    tensors = {name.removeprefix("model."): each for name, each in files.items() if "rotary_emb" not in name}
    share_with(target, config, tensors)
    _check_represented(kind, title, config, tensors)
    arguments = layer_shape(config | {"qk_norm": True}, target)
    del arguments["sliding_window"]
    arguments |= {"block_size": config.get("block_size", _BLOCK), "causal": bool(config["causal"])}
    arguments["mask_token"] = config.get("mask_token_id")
    arguments["layers"] = target.check_layers(config[LAYERS] if layers is None else layers)
    if kind is DSpark:
        confident = bool(config.get("enable_confidence_head", False))
        arguments |= {"markov_rank": config.get("markov_rank"), "confidence_head": confident}
    for key in ("block_size", "mask_token", *(("markov_rank",) if kind is DSpark else ())):
        if type(arguments[key]) is not int:
            wrong = f"config.json says {key}={arguments[key]!r}"
            raise UserError(f"{wrong}: expected a number, without which {title} cannot be read; restore the file")
    with torch.device("meta"), at_most(_SPARE + 4 * len(tensors), "config.json"):
        shell = kind(**arguments)
    fill_vocabulary(tensors, len(shell.d2t), shell.vocab_size)
    floats = {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}
    names = {name: name.replace("blocks.", "layers.", 1) for name in shell.state_dict()}
    shapes = {names[name]: tuple(each.shape) for name, each in shell.state_dict().items()}
    check_tensors(title, floats, shapes, "float32", _INTEGERS)
    check_vocabulary(floats)
    drafter = kind(**arguments)
    drafter.load_state_dict({name: floats[theirs] for name, theirs in names.items()})
    drafter.bind(target)
    return drafter.eval()


def _flat(published: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys, by the plain layout's names where the two differ."""
    if "speculators_model_type" in published:
        layer = dict(published.get("transformer_layer_config") or {})
        flat = {**layer, **published, "causal": False, LAYERS: published.get("aux_hidden_state_layer_ids")}
        flat |= {key: layer[key] for key in ("model_type", "vocab_size") if key in layer}
        flat.setdefault("model_type", "qwen3")
    else:
        inner = dict(published.get("dflash_config") or {})
        flat = {**inner, **published}
        causal = published.get("is_causal")
        flat["causal"] = inner.get("causal", False) if causal is None else causal
        counted = published.get("target_layer_ids") or inner.get("target_layer_ids") or []
        flat[LAYERS] = published.get(LAYERS) or [layer + 1 for layer in counted]
    if not flat[LAYERS]:
        raise UserError("the files do not say which layers of the target are read: expected such a key; restore it")
    return flat


def _check_represented(
    kind: type[DFlash], title: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Raises UserError that names what of the files ours does not compute."""
    from_anchor = bool(config.get("sample_from_anchor", kind is DSpark))
    windowed = "sliding_attention" in (config.get("layer_types") or ()) or config.get("use_swa")
    dspark = {} if kind is DFlash else {"markov_head_type": ("vanilla",), "dspark_bonus_anchor": (False,)}
    if kind is DSpark and config.get("enable_confidence_head"):
        dspark["confidence_head_with_markov"] = (True,)
    allowed: dict[str, tuple[Any, ...]] = {
        "model_type": ("qwen3",),
        "target_hidden_size": (config.get("hidden_size"),),
        "use_aux_hidden_state": (True,),
        "attention_bias": (False,),
        **dspark,
    }
    found = [f"{key}={config[key]}" for key, good in allowed.items() if config.get(key) not in (None, *good)]
    found += ["layers that see a window"] if windowed else []
    found += [f"sample_from_anchor={str(from_anchor).lower()}"] if from_anchor is (kind is DFlash) else []
    found += ["an embedding of its own"] if "embed_tokens.weight" in tensors else []
    if found:
        wrong = f"the files have {', '.join(found)}, which specdraft's {kind.__name__} does not represent"
        raise UserError(f"{wrong}: expected {title} as its paper has it; train one of your own")
