"""What an independent draft begins as: layers of the target, a small model of its architecture, or a sibling."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdraft.errors import UserError
from specdraft.targets import LanguageModel, Target, loading
from specdraft.targets.sharded import gathered
from specdraft.text import reason

STARTS = ("layers", "scratch", "checkpoint")


def find_start(
    target: Target,
    start: str,
    copy_layers: int | Sequence[int],
    shape: Mapping[str, Any] | None,
    checkpoint: str | None,
    revision: str | None,
    shares_tokenizer: bool = True,
) -> tuple[dict[str, Any], LanguageModel | None, Sequence[int]]:
    """The start of ``DraftModel.for_target``: the draft's configuration, ``model_type`` included, JSON-able; whose
    weights it takes, if anybody's; and which of those layers. Raises UserError for bad options and a sibling that does
    not fit."""
    if start == "layers":
        layers = _chosen_layers(copy_layers, target.num_layers)
        return _with_layers(describe(target.config), layers), target, layers
    if start == "scratch":
        shape = shape or {"num_hidden_layers": max(1, target.num_layers // 4)}
        return _reshaped(describe(target.config), shape), None, ()
    if start == "checkpoint":
        sibling = _sibling(checkpoint, revision, shape, target, shares_tokenizer)
        return describe(sibling.config), sibling, range(sibling.num_layers)
    raise UserError(f"start is {start!r}: expected one of {', '.join(STARTS)}")


def describe(config: PreTrainedConfig) -> dict[str, Any]:
    """What a configuration says of the architecture, as ``DraftModel`` takes it: without a soft-cap."""
    volatile = {"_name_or_path", "architectures", "transformers_version", "dtype", "id2label", "label2id"}
    kept = {key: value for key, value in config.to_dict().items() if key not in volatile}
    if "final_logit_softcapping" in kept:
        kept["final_logit_softcapping"] = None
    return kept


def build_model(config: Mapping[str, Any], attention: str) -> PreTrainedModel:
    """The transformers model of a configuration, with random weights. Raises UserError where there is none."""
    try:
        known = AutoConfig.for_model(**config)
        return AutoModelForCausalLM.from_config(known, attn_implementation=attention, trust_remote_code=False)
    except Exception as error:  # transformers and huggingface_hub raise a dozen kinds
        said = f"transformers cannot build the draft ({reason(error)})"
        raise UserError(f"{said}: expected a configuration that it knows; check model.drafter") from error


def take_weights(draft: LanguageModel, source: LanguageModel, layers: Sequence[int]) -> None:
    """Copy embedding, final norm, head, and of the source's layers those given. Raises UserError for layers that differ
    from each other in what they hold."""

    def counterpart(name: str) -> str:
        return re.sub(r"^layers\.(\d+)\.", lambda place: f"layers.{layers[int(place[1])]}.", name)

    copied = [parameter for layer in layers for parameter in source.decoder.layers[layer].parameters()]
    try:
        with gathered(copied):
            theirs = source.decoder.state_dict()
            draft.decoder.load_state_dict({name: theirs[counterpart(name)] for name in draft.decoder.state_dict()})
    except (KeyError, RuntimeError) as error:
        found = f"layers {list(layers)} do not fit a model of their own ({reason(error)})"
        raise UserError(f"{found}: expected ones built alike; choose others with model.drafter.copy_layers") from error
    draft.head.load_state_dict(source.head.state_dict())


def _with_layers(config: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The configuration of these layers alone: lists with an entry for each layer are shortened to theirs."""
    count = config["num_hidden_layers"]
    lists = {
        key: [value[layer] for layer in layers]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == count and not key.endswith("_token_id")
    }
    return config | lists | {"num_hidden_layers": len(layers)}


def _chosen_layers(wanted: int | Sequence[int], count: int) -> list[int]:
    if isinstance(wanted, int):
        layers = [round(place * (count - 1) / max(1, wanted - 1)) for place in range(wanted)]
    else:
        layers = [int(layer) for layer in wanted]
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= count:
        raise UserError(f"copy_layers is {wanted}: expected 1 to {count}, or ascending, distinct layers below {count}")
    return layers


def _reshaped(config: dict[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(shape) - set(config))
    count = shape.get("num_hidden_layers", config["num_hidden_layers"])
    if unknown or not isinstance(count, int) or count < 1:
        amiss = f"which has no {unknown[0]}" if unknown else "with at least 1 layer"
        wanted = f"entries of the configuration of {config['model_type']}, {amiss}"
        raise UserError(f"model.drafter.shape is {dict(shape)}: expected {wanted}")
    # Kinds of layers take turns as in the target.
    return _with_layers(config, [layer % config["num_hidden_layers"] for layer in range(count)]) | dict(shape)


def _sibling(
    name: str | None, revision: str | None, shape: Mapping[str, Any] | None, target: Target, shares_tokenizer: bool
) -> LanguageModel:
    name = _named(name)
    if target.device.type == "meta":  # a plan, which loads nothing
        return LanguageModel(AutoModelForCausalLM.from_config(_sibling_config(name, revision, shape)))
    model, tokenizer = loading.load(name, revision, "float32", attention(target), False, what="draft")
    if shares_tokenizer and target.tokenizer is not None and tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise UserError(
            f"the tokenizer of {name!r} has other tokens than the target's: expected the same vocabulary, id by id; "
            "choose a sibling of the target's own family, or start=layers"
        )
    sibling = LanguageModel(model)
    sibling.check_logits()
    return sibling


def has_other_tokens(
    target: Target,
    start: str = "layers",
    checkpoint: str | None = None,
    revision: str | None = None,
    shape: Mapping[str, Any] | None = None,
    **_: Any,
) -> bool:
    """Whether options of ``for_target`` name a checkpoint with another tokenizer than the target's, or with more or
    fewer ids. A plan knows the ids alone. Raises UserError for a model that is not named or not found."""
    ours, planned = target.tokenizer, target.device.type == "meta"
    if start != "checkpoint" or (ours is None and not planned):
        return False
    if ours is not None and loading.load_tokenizer(_named(checkpoint), revision).get_vocab() != ours.get_vocab():
        return True
    return sibling_size(target, checkpoint, revision, shape) != target.vocab_size


def sibling_size(target: Target, name: str | None, revision: str | None, shape: Mapping[str, Any] | None) -> int:
    """The ids of the model that start=checkpoint names. Raises UserError for one that is not named or not found."""
    shape = shape if target.device.type == "meta" else None
    return int(_sibling_config(_named(name), revision, shape).get_text_config().vocab_size)


def _named(name: str | None) -> str:
    if name is None:
        raise UserError("start=checkpoint needs a model: expected model.drafter.checkpoint=PATH or a hub id")
    return name


def _sibling_config(name: str, revision: str | None, shape: Mapping[str, Any] | None) -> PreTrainedConfig:
    return loading.load_config(name, revision) if shape is None else AutoConfig.for_model(**shape)


def attention(target: Target) -> str:
    """The attention implementation of a draft: one that takes the masks of trees, and the target's if it does."""
    return "eager" if target.config._attn_implementation == "eager" else "sdpa"
