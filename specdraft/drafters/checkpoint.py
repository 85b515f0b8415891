"""A trained drafter on disk: ``config.json`` and ``model.safetensors``, the drafter alone, in fp32, the masters of one
that computes with quantized weights.

The configuration says which class to build with which arguments, whose target it belongs to, and under which settings
it was trained, so that ``evaluate.py checkpoint=PATH`` needs nothing else."""

import importlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import specdraft
from specdraft.drafters.base import Drafter
from specdraft.drafters.quantization import quantize
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.errors import UserError
from specdraft.files import atomic_directory, embedded, member, read_json
from specdraft.redaction import redact
from specdraft.targets import Target, TargetIdentity
from specdraft.targets.chat_template import in_words, options_of, template_hash
from specdraft.targets.loading import NONE, quantization
from specdraft.targets.sizes import at_most, check_sizes
from specdraft.tensors import difference, kinds, read_kinds, read_tensors
from specdraft.text import reason

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SPARE = 64  # weights that a constructor may make and drop


def save_drafter(
    drafter: Drafter, directory: Path, target: TargetIdentity, extra: dict[str, Any] | None = None
) -> Path:
    """Write ``directory`` whole or not at all. ``extra`` (JSON-able) travels along: data, decoding, training."""
    kind = type(drafter)
    config = {
        "specdraft_version": specdraft.__version__,
        "drafter": {"_target_": f"{kind.__module__}.{kind.__qualname__}", **drafter.config()},
        "quantization": drafter.quantization,
        "files": sorted(drafter.files),
        "target": asdict(target),
        "extra": redact(extra or {}),
    }
    tensors = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    with atomic_directory(directory) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, content in drafter.files.items():
            (temporary / name).write_bytes(content)
    return directory


def about_target(target: Target) -> dict[str, Any]:
    """What an export must know of the target without loading it; travels in ``extra`` as "target"."""
    ids = {f"{kind}_token_id": getattr(target.config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")}
    return {
        "name": target.identity.name,
        "architecture": type(target.model).__name__,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantization": quantization(target.config),
        "num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_length,
        "logit_scale": target.logit_scale,
        "chat_template_hash": template_hash(target.tokenizer),
        "chat_template_options": options_of(target.tokenizer),
        **ids,
    }


def find(path: str | Path) -> Path:
    """The checkpoint directory at ``path``: itself, ``drafter/`` in a run directory, or ``embedded://NAME``, a drafter
    inside this package. Raises UserError if it is none of these."""
    path = embedded(str(path)) or path
    for candidate in (Path(path), Path(path) / "drafter"):
        if (candidate / CONFIG).is_file() and (candidate / WEIGHTS).is_file():
            return candidate
    run = next((each for each in Path(path).parents[:2] if (each / "drafter" / CONFIG).is_file()), None)
    inside = f"; {run} is one" if run is not None and Path(path).exists() else ""  # RUN/checkpoints/best.ckpt
    wanted = f"a directory with {CONFIG} and {WEIGHTS}, or a run directory that holds one as drafter/{inside}"
    raise UserError(f"there is no drafter checkpoint at {path}: expected {wanted}")


def read_config(path: str | Path) -> dict[str, Any]:
    """The checkpoint's configuration. Raises UserError if there is none or it lacks a part."""
    directory = find(path)
    config = read_json(member(directory, CONFIG))
    if isinstance(config, dict) and "architectures" in config:
        mend = "give the run that it was exported from, or import an EAGLE-3 head with specdraft import"
        raise UserError(f"{directory} is a model for an engine, by its {CONFIG}: expected a drafter; {mend}")
    if not _is_whole(config):
        wanted = "the keys drafter, target and extra as they were written; restore the file"
        raise UserError(f"{directory / CONFIG} is not a drafter's configuration: expected {wanted}")
    return config


def drafter_class(path: str | Path) -> type[Drafter]:
    """The class of a checkpoint's drafter. Raises UserError as ``read_config``, and for one that is not known."""
    return _drafter_class(read_config(path)["drafter"]["_target_"], find(path))


def load_drafter(path: str | Path, quantization: str | None = None) -> tuple[Drafter, dict[str, Any]]:
    """Rebuild the drafter (fp32, CPU, eval mode) and return it with its configuration. It computes with weights
    quantized as ``quantization`` says, None: as it was trained to. Raises UserError if the checkpoint is missing,
    damaged, or does not fit its own configuration: the module is built without memory first and compared with the
    file's header, so that nothing else is ever allocated; and for a quantization that the drafter has not."""
    directory, config = find(path), read_config(path)
    arguments = dict(config["drafter"])
    kind = _drafter_class(arguments.pop("_target_"), directory)
    where = str(directory / CONFIG)
    check_sizes(arguments, where)
    weights = member(directory, WEIGHTS)
    held = read_kinds(weights)
    try:
        with torch.device("meta"), at_most(_SPARE + 4 * len(held), where):  # tied weights are registered several times
            expected = kinds(kind(**arguments).state_dict())
        amiss = difference(expected, held)
        if amiss is None:
            drafter = kind(**arguments)
            drafter.load_state_dict(read_tensors(weights))
    except UserError:
        raise
    except Exception as error:  # constructors, transformers and torch raise a dozen kinds
        amiss = reason(error)
    if amiss is not None:
        found = f"the checkpoint {directory} does not fit {kind.__name__} ({amiss})"
        raise UserError(f"{found}: expected one of this version")
    for module in drafter.modules():
        if isinstance(module, DraftVocabulary):
            module.set_draft_vocabulary(module.draft_ids)  # checks them
    drafter.files = {name: _read(directory, name) for name in config.get("files", [])}
    quantize(drafter, quantization or config.get("quantization"))
    return drafter.eval().requires_grad_(False), config


def complete_target(settings: Any, config: Mapping[str, Any]) -> None:
    """Fill in what the ``target`` of a configuration leaves open: the name, revision and options of the chat template
    that the checkpoint recorded, and the type, float32 on a CPU and the target's own on a GPU."""
    if settings.name is None:
        settings.name, settings.revision = config["target"]["name"], config["target"]["revision"]
    complete_options(settings, config)
    if settings.dtype is None:
        settings.dtype = "auto" if torch.cuda.is_available() and settings.device != "cpu" else "float32"


def complete_options(settings: Any, config: Mapping[str, Any]) -> None:
    """Of these the options of the chat template alone."""
    if settings.get("chat_template_options") is None and (recorded := recorded_options(config)):
        from omegaconf import open_dict  # vLLM's environment, which imports this module, has none

        with open_dict(settings):
            settings.chat_template_options = recorded


def recorded_options(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of the chat template that the checkpoint was trained with; None where it does not say."""
    recorded: dict[str, Any] | None = config.get("extra", {}).get("target", {}).get("chat_template_options")
    return recorded


def other_options(config: Mapping[str, Any], target: Target) -> str | None:
    """A sentence where conversations are rendered with other options of the chat template than in training."""
    trained, given = recorded_options(config), options_of(target.tokenizer)
    if trained is None or trained == given:
        return None
    mend = "give those of the training as target.chat_template_options and serve with them, or train with these"
    return f"prompts are rendered with {in_words(given)}, trained with {in_words(trained)}: expected the same; {mend}"


def check_target(config: dict[str, Any], target: Target) -> None:
    """Raises UserError if the checkpoint was trained for another target than this one, or for other weights of it."""
    trained, given = config["target"], asdict(target.identity)
    before, now = config.get("extra", {}).get("target", {}).get("quantization", NONE), quantization(target.config)
    configuration = "another configuration"
    if before != now:
        configuration = f"weights quantized otherwise ({now}, and not {before} as in training)"
    for part, what in (("config_hash", configuration), ("weights_hash", "other weights")):
        if trained.get(part) != given[part]:
            raise UserError(
                f"this checkpoint belongs to the target {trained.get('name')!r}, which has {what} than the given "
                f"{given['name']!r}: expected the target that it was trained for; train a drafter for this one"
            )


def _read(directory: Path, name: str) -> bytes:
    try:
        return member(directory, name).read_bytes()
    except OSError as error:
        found = f"the checkpoint {directory} has no readable {name} ({error.strerror})"
        raise UserError(f"{found}: expected the file that its {CONFIG} names; restore it") from error


def _is_whole(config: Any) -> bool:
    """Whether everything that anybody reads of a configuration is of the right type."""
    if not isinstance(config, dict):
        return False
    drafter, target, extra = config.get("drafter"), config.get("target"), config.get("extra", {})
    if not (isinstance(drafter, dict) and isinstance(target, dict) and isinstance(extra, dict)):
        return False
    texts = [drafter.get("_target_"), *(target.get(key) for key in ("name", "config_hash", "weights_hash"))]
    parts = [extra.get(key, {}) for key in ("data", "decoding", "training", "target")]
    options = parts[3].get("chat_template_options") if isinstance(parts[3], dict) else None
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(target.get("revision"), str | None)
        and isinstance(config.get("quantization"), str | None)
        and isinstance(files := config.get("files", []), list)
        and all(isinstance(name, str) for name in files)
        and all(isinstance(part, dict) for part in parts)
        and isinstance(options, dict | None)
        and type(parts[1].get("num_draft_tokens", 1)) is int
    )


def _drafter_class(path: str, directory: Path) -> type[Drafter]:
    # A checkpoint may name a class, but not make us import a module that nobody asked for.
    if path.startswith("specdraft.drafters."):
        with suppress(ImportError):
            importlib.import_module(path.rpartition(".")[0])
    found = _known_drafters(Drafter).get(path)
    if found is None:
        wanted = "a class of specdraft.drafters, or one of your own that imports=[MODULE] names"
        raise UserError(f"{directory / CONFIG} names the drafter {path!r}, which is not known: expected {wanted}")
    return found


def _known_drafters(base: Any) -> dict[str, type[Drafter]]:
    known: dict[str, type[Drafter]] = {}
    for kind in base.__subclasses__():
        known |= {f"{kind.__module__}.{kind.__qualname__}": kind, **_known_drafters(kind)}
    return known
