"""Public EAGLE-3 and P-EAGLE heads.

The plain layout (EAGLE's own, SGLang's, vLLM's) and that of speculators are read, with every option that vLLM 0.32
computes. What our head does not compute is refused by its name: an engine may compute it, and another head than the one
that was published would be measured."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.checkpoint import about_target
from specdraft.drafters.eagle import Eagle3, PEagle
from specdraft.errors import UserError
from specdraft.export.eagle3 import LAYERS, MASK, QWEN3, layout_config, layout_tensors, published_name, validate
from specdraft.export.importing.shared import fill_vocabulary, layer_shape, share_with
from specdraft.targets import Target
from specdraft.targets.sizes import at_most

# Speculators' name for the first layer, and SGLang's earlier names.
_RENAMED = {"layers.0.": "midlayer."}
_RENAMED |= {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_REFUSED = {f"{part}.bias": f"a bias in {part}" for part in ("fc", "gate_proj", "up_proj", "down_proj")}
# What a tensor tells, whatever the configuration says or leaves out.
_TOLD = {"fc_norm": "fc_norm.", "norm_before_fc": "input_norm.", "attention_bias": "self_attn.q_proj.bias"}
_TOLD |= {"qk_norm": "self_attn.q_norm", "own_embedding": "embed_tokens"}
_MASKS = ("mask_token_id", "pard_token", MASK)  # where vLLM looks for a P-EAGLE head's mask, in this order
_LONGEST = 8  # tokens that an imported P-EAGLE head drafts at most: its files do not say how many it was trained for
_SPARE = 64  # weights that ours has and the file need not say, or that a constructor makes and drops
_FURTHER_NORM = re.compile(r"(layers\.\d+)\.(?:input_layernorm|hidden_norm)\.weight")


def read_eagle3(
    published: Mapping[str, Any], files: Mapping[str, Tensor], target: Target, layers: Sequence[int] | None
) -> Eagle3:
    """The head of these files, weights in fp32, bound to ``target``. ``layers``: see ``import_head``. Raises UserError
    for files of another target, or of a head that ours does not represent."""
    config, tensors = _flat(published), _named(files)
    share_with(target, config, tensors)
    told = {option: any(part in name for name in tensors) for option, part in _TOLD.items()}
    config |= {"model_type": _layer_type(published), "qk_norm": _layer_type(published) == QWEN3[1]}
    _check_represented(config, tensors, told)
    layers = target.check_layers(_layers(config, published, target) if layers is None else layers)
    flags = {option: bool(config.get(option, False)) for option in ("norm_before_residual", "norm_output")}
    arguments = {**layer_shape(config, target), **told, **flags, "layers": layers}
    kind, arguments = (PEagle, arguments | _masks(config)) if "mask_hidden" in tensors else (Eagle3, arguments)
    # Nothing is allocated, and not many modules are made, before the file is known to hold them.
    with torch.device("meta"), at_most(_SPARE + 4 * len(tensors), "config.json"):
        shell = kind(**arguments)
    fill_vocabulary(tensors, len(shell.d2t), shell.vocab_size)
    # The exporter's own validation, on the file's tensors: what it accepts, our head and every engine read alike.
    about = layout_config(shell.config(), about_target(target), "float32")
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    validate(about, layout_tensors(floats, about), target.num_layers)
    head = kind(**arguments)
    head.load_state_dict({name: floats[published_name(name)] for name in head.state_dict()})
    head.bind(target)
    return head.eval()


def _masks(config: Mapping[str, Any]) -> dict[str, Any]:
    found = next((config[key] for key in _MASKS if config.get(key) is not None), None)
    if type(found) is not int:
        wrong = f"the head drafts in parallel, and its mask token is {found!r}"
        raise UserError(f"{wrong}: expected an id, as {', '.join(_MASKS)} of config.json say it; restore the file")
    return {"mask_token": found, "ttt_steps": _LONGEST}


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plain layout's names; tables that the rotary embedding computes anyway are left out. The norm before the
    attention of a further layer has two names there. Raises UserError where they hold two norms."""
    named = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours)
        if "rotary_emb" not in name:
            named[name] = tensor
    for layer in {found[1] for found in map(_FURTHER_NORM.fullmatch, named) if found}:
        names = [f"{layer}.{norm}.weight" for norm in ("input_layernorm", "hidden_norm")]
        held = [named[name] for name in names if name in named]
        if not torch.equal(held[0], held[-1]):
            wrong = f"the head's {' and '.join(names)} differ, of which vLLM reads the former and SGLang the latter"
            raise UserError(f"{wrong}: expected one norm; remove the one that it was not trained with")
        named |= dict.fromkeys(names, held[0])
    return named


def _layer_type(published: Mapping[str, Any]) -> str:
    """Whose decoder layers vLLM takes: speculators' configuration says so, else the architecture."""
    if "speculators_model_type" in published:
        said = (published.get("transformer_layer_config") or {}).get("model_type", "llama")
    else:
        said = "qwen3" if "qwen3" in str(published.get("architectures")).lower() else "llama"
    if said not in ("llama", "qwen3"):
        raise UserError(f"the head has layers of the type {said!r}: expected llama or qwen3, which vLLM serves")
    return str(said)


def _flat(published: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys. speculators keeps the layer's apart; its EAGLE-3 heads norm before the residual by default."""
    if "speculators_model_type" not in published:
        return dict(published) | dict(published.get("eagle_config") or {})  # where both speak, vLLM believes the latter
    layer = dict(published.get("transformer_layer_config") or {})
    usual = {"norm_before_residual": published["speculators_model_type"] == "eagle3"}  # as vLLM takes a file without it
    return {**usual, **layer, **published, "num_hidden_layers": layer.get("num_hidden_layers", 1)}


def _check_represented(config: Mapping[str, Any], tensors: Mapping[str, Tensor], told: Mapping[str, bool]) -> None:
    found = [what for part, what in _REFUSED.items() if any(part in name for name in tensors)]
    if not bool(config.get("use_aux_hidden_state", True)):
        found.append(f"use_aux_hidden_state={str(config['use_aux_hidden_state']).lower()}")
    for key, only in (("target_hidden_size", config.get("hidden_size")), ("hidden_act", "silu")):
        if config.get(key) not in (None, only):
            found.append(f"{key}={config[key]}")
    if found:
        raise UserError(
            f"the head has {', '.join(found)}, which specdraft's EAGLE-3 does not represent: expected one that reads "
            "auxiliary states, as wide as its target, without biases but in the attention; train a head of your own"
        )
    for option, held in told.items():
        if bool(config.get(option, held)) is not held:
            says = f"config.json says {option}={str(config[option]).lower()}"
            raise UserError(f"{says}, and the tensors are those of the contrary: expected both of one head; restore it")


def _layers(config: Mapping[str, Any], published: Mapping[str, Any], target: Target) -> Sequence[int]:
    if published.get(LAYERS):
        return sorted(published[LAYERS])  # as engines do
    if config.get(LAYERS):
        ids = sorted(config[LAYERS])
        raise UserError(
            f"the head names its layers in eagle_config alone, as {ids}: SGLang reads them as the hidden states after "
            f"{[k + 1 for k in ids]} layers, vLLM as after {ids}; say which it was trained for with --layers"
        )
    return target.default_layers()
