"""A public EAGLE-3 head becomes one of our checkpoints, to be evaluated or exported: ``specdraft import``.

The plain layout (EAGLE's own, SGLang's, vLLM's) and that of speculators are read. What our head does not compute is
refused by its name: an engine may compute it, and another head than the one that was published would be measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from specdraft.drafters.checkpoint import about_target
from specdraft.drafters.eagle import Eagle3
from specdraft.errors import UserError
from specdraft.export.eagle3 import LAYERS, SIZES, layout_config, layout_tensors, validate
from specdraft.files import member, read_json
from specdraft.onednn import plain
from specdraft.targets import Target
from specdraft.tensors import read_tensors
from specdraft.text import reason

# Speculators' name for the only layer, and SGLang's earlier names.
_RENAMED = {"layers.0.": "midlayer."}
_RENAMED |= {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_REFUSED = {
    "layers.1.": "more than one layer",
    **dict.fromkeys(("q_norm", "k_norm"), "norms of queries and keys (qk-norm)"),
    "input_norm": "a norm before the fusion (norm_before_fc)",
    "mask_hidden": "parallel drafting",
    ".bias": "biases",
}


def import_eagle3(directory: str | Path, target: Target, layers: Sequence[int] | None = None) -> Eagle3:
    """The head in ``directory``, weights in fp32, bound to ``target``.
    layers: the auxiliary layers k (hidden states after k layers), where the files do not say them, or not for sure.
    Raises UserError for files that are missing, damaged, of another target, or of a head that ours does not represent.
    """
    directory = Path(directory)
    published = read_json(member(directory, "config.json"))
    if not isinstance(published, dict):
        raise UserError(f"{directory / 'config.json'} is no configuration: expected an EAGLE-3 head; restore it")
    tensors = _read(directory)
    if family := _other_family(published, tensors):
        wrong = f"{directory} is an export of {family}: expected one of an EAGLE-3 head"
        raise UserError(f"{wrong}, as others are not read back; give the run that it came from instead")
    try:
        return _head(published, tensors, target, layers)
    except UserError:
        raise
    except Exception as error:  # values of any type may stand where transformers and torch expect theirs
        message = f"{directory} holds no EAGLE-3 head ({reason(error)}): expected one; download it again"
        raise UserError(message) from error


def _head(
    published: dict[str, Any], files: Mapping[str, Tensor], target: Target, layers: Sequence[int] | None
) -> Eagle3:
    config, tensors = _flat(published), _named(files)
    norms = any(name.startswith("fc_norm.") for name in tensors)
    _check_represented(config, tensors, norms)
    _share_with(target, config, tensors)
    layers = target.check_layers(_layers(config, published, target) if layers is None else layers)
    arguments = _shape(config, target)
    arguments |= {"layers": layers, "fc_norm": norms, "norm_output": bool(config.get("norm_output", False))}
    with torch.device("meta"):  # nothing is allocated before the file is known to hold it
        shell = Eagle3(**arguments)
    _check_vocabulary(tensors, len(shell.d2t), shell.vocab_size)
    # The exporter's own validation, on the file's tensors: what it accepts, our head and every engine read alike.
    about = layout_config(shell.config(), about_target(target), "float32")
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    validate(about, layout_tensors(floats, about), target.num_layers)
    head = Eagle3(**arguments)
    head.load_state_dict(head.state_dict() | floats)
    head.bind(target)
    return head.eval()


def _read(directory: Path) -> dict[str, Tensor]:
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    pickles = sorted(file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in directory.glob(f"*.{suffix}"))
    if not files and pickles:
        raise UserError(
            f"{directory / pickles[0]} is a pickle, which can run code when it is read: expected *.safetensors; if you "
            "trust it, convert it with `safetensors.torch.save_file(torch.load(path, weights_only=True), path)`"
        )
    if not files:
        raise UserError(f"{directory} holds no weights: expected *.safetensors; check the path")
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors |= read_tensors(member(directory, name))
    return tensors


def _other_family(published: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str | None:
    """What the files hold, if that is another kind of drafter; an EAGLE-3 head may call itself LlamaForCausalLM."""
    says = f"{published.get('architectures')} {published.get('model_type')}".lower()
    if "medusa" in says:
        return "Medusa heads"
    if any(word in says for word in ("eagle3", "speculator")) or any("hidden_norm" in name for name in tensors):
        return None
    return "an EAGLE-1 head" if any(name.endswith("fc.weight") for name in tensors) else "a draft model"


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plain layout's names; tables that the rotary embedding computes anyway are left out."""
    named = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours)
        if "rotary_emb" not in name:
            named[name] = tensor
    return named


def _flat(published: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys. speculators keeps the layer's apart, and norms before the residual unless told otherwise."""
    if "speculators_model_type" not in published:
        return dict(published) | dict(published.get("eagle_config") or {})  # where both speak, vLLM believes the latter
    if (kind := published["speculators_model_type"]) != "eagle3":
        raise UserError(f"the files hold a speculator of the type {kind!r}: expected an EAGLE-3 head ('eagle3')")
    layer = dict(published.get("transformer_layer_config") or {})
    return {"norm_before_residual": True, **layer, **published, "num_hidden_layers": layer.get("num_hidden_layers", 1)}


def _check_represented(config: Mapping[str, Any], tensors: Mapping[str, Tensor], norms: bool) -> None:
    found = [what for part, what in _REFUSED.items() if any(part in name for name in tensors)]
    if config.get("num_hidden_layers", 1) != 1:
        found.append("more than one layer")
    switches = dict.fromkeys(("norm_before_residual", "norm_before_fc", "attention_bias"), False)
    for key, expected in (switches | {"use_aux_hidden_state": True, "fc_norm": norms}).items():
        if bool(config.get(key, expected)) is not expected:
            found.append(f"{key}={str(config[key]).lower()}")
    for key, only in (("target_hidden_size", config.get("hidden_size")), ("hidden_act", "silu")):
        if config.get(key) not in (None, only):
            found.append(f"{key}={config[key]}")
    if found:
        raise UserError(
            f"the head has {', '.join(dict.fromkeys(found))}, which specdraft's EAGLE-3 does not represent: expected "
            "one layer, no biases, and no norms but those of EAGLE-3 and fc_norm; train a head of your own instead"
        )


def _share_with(target: Target, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Drop an embedding that is the target's, and fill in the projection that engines would share."""
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(key) != wanted:
            wrong = f"the head's {key} is {config.get(key)} and the target's {wanted}"
            raise UserError(f"{wrong}: expected a head of this target; name its own with --target")
    own = tensors.pop("embed_tokens.weight", None)
    if own is not None and not torch.equal(own, target.embedding_weight.to(own.device, own.dtype)):
        raise UserError(
            "the head has an embedding of its own, which differs from the target's: expected the target's, which "
            "SGLang would use in any case; name the target it was trained for with --target"
        )
    if (config.get("draft_vocab_size") or target.vocab_size) == target.vocab_size:
        tensors.setdefault("lm_head.weight", plain(target.head.weight.detach()).cpu())


def _shape(config: Mapping[str, Any], target: Target) -> dict[str, Any]:
    # transformers knows the defaults of keys that were left out, and every way to write down a rotary embedding.
    known = (*SIZES, "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters")
    given = {key: config[key] for key in known if config.get(key) is not None}
    given["draft_vocab_size"] = config.get("draft_vocab_size") or target.vocab_size
    layer = LlamaConfig(**given | {"max_position_embeddings": target.max_length})
    shape = {key: getattr(layer, key) for key in (*SIZES, "rms_norm_eps", "hidden_act")}
    return shape | {"rope_parameters": dict(layer.rope_parameters)}


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


def _check_vocabulary(tensors: dict[str, Tensor], draft_size: int, vocab_size: int) -> None:
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
