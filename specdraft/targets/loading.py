"""From a name to a frozen transformers model and its tokenizer, with one sentence when that cannot be."""

import hashlib
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from specdraft.errors import UserError
from specdraft.files import embedded, member, read_json
from specdraft.targets.chat_template import bind_options, checked_options
from specdraft.targets.gguf import converted, is_gguf
from specdraft.targets.sharded import gathered
from specdraft.targets.sizes import check_sizes
from specdraft.tensors import dequantized
from specdraft.text import fingerprint, reason

NONE = "none"
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def location(name: str) -> str:
    """The path or hub id that ``from_pretrained`` takes. ``embedded://NAME`` is a target inside this package; a GGUF
    file is converted first (see ``gguf.py``); no shell expands the ``~`` of ``target.name=~/DIR``. Raises UserError."""
    if is_gguf(name):
        return str(converted(name))
    folder = embedded(name)
    if folder is None:
        return str(Path(name).expanduser()) if name.startswith("~") else name
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"there is no embedded target {name!r}: expected embedded://tiny")
    return str(folder)


def recorded_name(name: str) -> str:
    """The name as checkpoints and exports record it: of a directory or file here the whole path, so that it is found
    from wherever they are read; ``~`` stays, as it is found so."""
    path = Path(name)
    return str(path.absolute()) if path.exists() else name


def load(
    name: str,
    revision: str | None,
    dtype: str,
    attention: str,
    trust_remote_code: bool,
    what: str = "target",
    device_map: dict[str, Any] | None = None,
    chat_template_options: Any = None,
) -> tuple[Any, Any]:
    """The causal LM, which errors call the ``what``, and its tokenizer. ``attention`` "auto": sdpa where transformers
    has it for the architecture, else eager. ``chat_template_options`` are bound to the tokenizer. Raises UserError if
    the hub, the files or the architecture are missing, and as ``bind_options``, before the model is read."""
    read_tokenizer = partial(load_tokenizer, name, revision, trust_remote_code, f"tokenizer of the {what}")
    if chat_template_options:
        bind_options(read_tokenizer(), chat_template_options)
    model = load_model(name, revision, dtype, attention, trust_remote_code, what, device_map)
    tokenizer = read_tokenizer()
    bind_options(tokenizer, chat_template_options)
    return model, tokenizer


def load_model(
    name: str,
    revision: str | None,
    dtype: str,
    attention: str,
    trust_remote_code: bool = False,
    what: str = "target",
    device_map: dict[str, Any] | None = None,
) -> Any:
    """As ``load``, the causal LM alone."""
    if dtype not in _DTYPES:
        raise UserError(f"target.dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    where = location(name)
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        check_files(where, revision)
        read = partial(AutoModelForCausalLM.from_pretrained, where, use_safetensors=True, output_loading_info=True)
        implementation = None if attention == "auto" else attention
        model, report = read(dtype=dtype, attn_implementation=implementation, device_map=device_map, **common)
    except UserError:
        raise
    except Exception as error:  # transformers, the hub client and safetensors raise a dozen kinds
        if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
            wanted = "target.attn_implementation=auto or eager"
            raise UserError(f"the {what} {name!r} has no sdpa attention in transformers: expected {wanted}") from error
        raise _cannot_load(what, name, error) from error
    if missing := report["missing_keys"]:  # transformers fills them with random numbers and goes on
        lack = f"its files lack {len(missing)} of its weights, {min(missing)} among them"
        raise UserError(f"cannot load the {what} {name!r}: {lack}; expected a complete causal LM")
    return model


def load_tokenizer(
    name: str, revision: str | None = None, trust_remote_code: bool = False, what: str = "tokenizer"
) -> Any:
    """A tokenizer alone, by hub id or directory, which errors call the ``what``. Raises UserError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(location(name), revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        raise _cannot_load(what, name, error) from error


def check_options(settings: Any) -> None:
    """Raises UserError as ``bind_options`` for ``chat_template_options`` of the ``target`` node, where nothing but the
    tokenizer has to be read; without options not even that."""
    if options := checked_options(settings.get("chat_template_options")):
        name, revision = settings["name"], settings.get("revision")
        tokenizer = load_tokenizer(name, revision, settings.get("trust_remote_code", False), "tokenizer of the target")
        bind_options(tokenizer, options)


def load_config(name: str, revision: str | None = None) -> PreTrainedConfig:
    """A draft's configuration alone, by hub id or directory. Raises UserError if there is none."""
    try:
        return AutoConfig.from_pretrained(location(name), revision=revision, trust_remote_code=False)
    except Exception as error:  # as above
        raise _cannot_load("configuration of the draft", name, error) from error


def _cannot_load(what: str, name: str, error: Exception) -> UserError:
    wanted = "a local from_pretrained directory or a reachable hub id"
    if what == "target":
        wanted += ", as target.name=PATH names it"
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        return UserError(f"there is no directory {name}: expected the {what} there, {wanted}")
    said = f"{type(error).__name__}: {reason(error)}"
    return UserError(f"cannot load the {what} {name!r} ({said}): expected {wanted}")


def check_files(where: str, revision: str | None) -> None:
    """Raises UserError for an adapter that is not merged, for a configuration of sizes that no model has, for end marks
    that cannot be read, and for an index that leads out of its folder; and what transformers raises where there is no
    configuration."""
    if (adapter := Path(where) / "adapter_config.json").is_file():
        wrong = f"{where} holds an adapter of {read_json(adapter).get('base_model_name_or_path')}"
        wanted = "whole weights; merge it (peft's merge_and_unload, then save_pretrained) and name that directory"
        raise UserError(f"{wrong} ({adapter.name}): expected {wanted}")
    config, _ = PreTrainedConfig.get_config_dict(where, revision=revision)
    check_sizes(config, f"the configuration of {where}")
    if (generation := Path(where) / "generation_config.json").is_file():
        read_json(generation)  # transformers goes on without
    index = Path(where) / "model.safetensors.index.json"
    if not index.is_file():
        return
    content = read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{index} names no files: expected a weight_map as save_pretrained writes it; restore it")
    for file in set(files.values()):
        member(Path(where), file)


def checkpoint_dtype(name: str, revision: str | None, dtype: str, trust_remote_code: bool) -> torch.dtype:
    """The dtype that ``load`` will give the weights; "auto" is what the configuration says."""
    if dtype == "auto":
        config = AutoConfig.from_pretrained(location(name), revision=revision, trust_remote_code=trust_remote_code)
        return config.dtype or torch.float32
    return getattr(torch, dtype)


def config_hash(config: PreTrainedConfig) -> str:
    """A hash of what the configuration says of the architecture; file locations and versions are left out."""
    volatile = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    return fingerprint({key: value for key, value in config.to_dict().items() if key not in volatile})


def quantization(config: Any) -> str:
    """By what method a configuration says that the weights are quantized, such as "compressed-tensors"."""
    method = getattr(config, "quantization_config", None) or {}
    found = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
    return NONE if found is None else str(getattr(found, "value", found))


def _at_hand(module: nn.Module) -> AbstractContextManager[Any]:
    """While it lasts, the module's own weights are there, also those that ``device_map.py`` left on disk."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def weights_hash(model: nn.Module) -> str:
    """A fingerprint of the first values of every weight, alike in every dtype that a bfloat16 checkpoint is loaded in.
    Every weight, because a fine-tuned target (merged LoRA, say) may keep head, norms and embedding. Values below
    float16's smallest normal number, of which it keeps fewer bits, count as zero. A float32 checkpoint is alike in
    float32 and in bfloat16."""
    digest = hashlib.sha256()
    for name, _ in sorted(model.named_parameters()):
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        with gathered([module.get_parameter(own)]), _at_hand(module):
            start = dequantized(module.get_parameter(own).detach()).flatten()[:64].to("cpu", torch.bfloat16)
        start = start.masked_fill(start.abs() < torch.finfo(torch.float16).tiny, 0.0)
        digest.update(name.encode() + start.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
