"""From a name to a frozen transformers model and its tokenizer, with one sentence when that cannot be."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from specdraft.errors import UserError

_EMBEDDED = "embedded://"
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def location(name: str) -> str:
    """The path or hub id that ``from_pretrained`` takes; ``embedded://NAME`` is a target inside this package."""
    if not name.startswith(_EMBEDDED):
        return name
    folder = Path(__file__).parent.parent / "embedded" / name.removeprefix(_EMBEDDED)
    if not (folder / "config.json").is_file():
        raise UserError(f"there is no embedded target {name!r}: expected embedded://tiny")
    return str(folder)


def load(
    name: str, revision: str | None, dtype: str, attention: str, trust_remote_code: bool, what: str = "target"
) -> tuple[Any, Any]:
    """The causal LM, which errors call the ``what``, and its tokenizer.

    Raises UserError if the hub, the files or the architecture are missing.
    """
    if dtype not in _DTYPES:
        raise UserError(f"target.dtype is {dtype!r}: expected one of {', '.join(_DTYPES)}")
    where = location(name)
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, attn_implementation=attention, output_loading_info=True, **common
        )
        tokenizer = AutoTokenizer.from_pretrained(where, **common)
    except Exception as error:  # transformers, the hub client and safetensors raise a dozen kinds
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot load the {what} {name!r} ({type(error).__name__}: {reason}): "
            "expected a local from_pretrained directory or a reachable hub id"
        ) from error
    if report["missing_keys"]:  # transformers fills them with random numbers and goes on
        raise UserError(
            f"cannot load the {what} {name!r}: its files lack {len(report['missing_keys'])} of its weights, "
            f"{min(report['missing_keys'])} among them; expected a complete causal LM"
        )
    return model, tokenizer


def config_hash(config: PreTrainedConfig) -> str:
    """A hash of what the configuration says of the architecture; file locations and versions are left out."""
    volatile = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    kept = {key: value for key, value in config.to_dict().items() if key not in volatile}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_hash(model: nn.Module) -> str:
    """A fingerprint of the first values of every weight, alike in every loading dtype.

    Every weight, because a fine-tuned target (merged LoRA, say) may keep head, norms and embedding.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        start = weight.detach().flatten()[:64].to("cpu", torch.bfloat16)
        digest.update(name.encode() + start.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
