"""What can be known of a target without its weights: its configuration, and its modules on the meta device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from specdraft.errors import UserError
from specdraft.targets import Target, TargetIdentity
from specdraft.targets.loading import check_files, config_hash, location
from specdraft.targets.sizes import at_most
from specdraft.text import reason

_TIMEOUT = 5.0  # seconds; the hub client's own retries would take half a minute to say the same
_MOST_WEIGHTS = 200_000  # tensors: those of 1,000 experts, one by one, in 60 layers
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def target_config(settings: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of the target that ``settings`` (the ``target`` node) names. Raises UserError if neither the
    disk nor the hub has it, weights included, so that nobody waits for data preparation to learn it."""
    name, revision = settings["name"], settings.get("revision")
    where = location(name)
    if not Path(where).is_dir():
        if where.startswith((".", "/", "~")) or where.count("/") > 1 or not _may_be_on_hub(where):
            raise UserError(f"the target {name!r} does not exist: expected a from_pretrained directory or a hub id")
        if not _cached(where, revision):
            _ask_hub(where, revision)
    trusted = settings.get("trust_remote_code", False)
    try:
        check_files(where, revision)
        return AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trusted)
    except UserError:
        raise
    except Exception as error:  # transformers and the hub client raise a dozen kinds
        what = f"cannot read the configuration of the target {name!r} ({reason(error)})"
        raise UserError(f"{what}: expected a from_pretrained directory or a reachable hub id") from error


def shape_config(shape: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a published shape (the ``target_shape`` node of a target's YAML)."""
    return AutoConfig.for_model(**shape)


class MetaTarget(Target):
    """A target on the meta device: sizes and layer numbers, no arithmetic."""

    def __init__(self, config: PreTrainedConfig, name: str, trust_remote_code: bool = False) -> None:
        """Raises UserError for a configuration that is none of a causal LM, or of more weights than any has."""
        try:
            with torch.device("meta"), at_most(_MOST_WEIGHTS, f"the configuration of {name}"):
                self.model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=trust_remote_code
                )
        except UserError:
            raise
        except Exception as error:  # what a size of zero does in a model's constructor is its own affair
            what = f"the configuration of {name} makes no causal LM ({reason(error)})"
            raise UserError(f"{what}: expected sizes that belong together; restore its config.json") from error
        self.tokenizer = None
        self.config = config.get_text_config()
        self.decoder = self.model.get_decoder()
        self.norm = self.decoder.norm
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.head.weight.shape[0]
        self.num_layers = len(self.decoder.layers)
        self.max_length = self.config.max_position_embeddings
        self.identity = TargetIdentity(name, None, config_hash(self.config), "")


def bytes_per_parameter(dtype: str, config: PreTrainedConfig) -> int:
    """Bytes of one weight once loaded; "auto" is what the checkpoint holds."""
    if dtype == "auto":
        dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in _BYTES:
        raise UserError(f"target.dtype is {dtype!r}: expected auto, {', '.join(_BYTES)}")
    return _BYTES[dtype]


def _may_be_on_hub(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:  # a space, say
        return False
    return True


def _cached(name: str, revision: str | None) -> bool:
    files = ("config.json", "model.safetensors", "model.safetensors.index.json")
    config, *weights = (isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
    return config and any(weights)


def _ask_hub(name: str, revision: str | None) -> None:
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=_TIMEOUT)
    except GatedRepoError:
        mend = "accept its license on the hub and log in with `hf auth login`"
        raise UserError(f"the target {name!r} is gated: {mend}") from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        what = f"the target {name!r} (revision {revision or 'main'}) is not on the hub"
        raise UserError(f"{what}: check target.name, or log in if it is private") from None
    except Exception as error:
        raise UserError(
            f"the target {name!r} is not on this machine and the Hugging Face hub cannot be reached ({error}): connect "
            "or set target.name to a from_pretrained directory"
        ) from error
