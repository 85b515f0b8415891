"""Which kind of drafter a published directory holds, and who reads it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.export.importing.dflash import read_dflash, read_dspark
from specdraft.export.importing.eagle3 import read_eagle3
from specdraft.export.importing.files import read_published
from specdraft.export.importing.redrafter import read_redrafter
from specdraft.export.layout import TITLES
from specdraft.export.redrafter import MODEL_TYPE
from specdraft.targets import Target
from specdraft.text import reason

Reader = Callable[[Mapping[str, Any], Mapping[str, Tensor], Target, Sequence[int] | None], Drafter]
_READERS: dict[str, Reader] = {
    "eagle3": read_eagle3,
    "dflash": read_dflash,
    "dspark": read_dspark,
    "redrafter": read_redrafter,
}
READ = "an EAGLE-3 or P-EAGLE head, a DFlash or DSpark drafter, or a ReDrafter"
_SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_OTHERS = {"medusa": "Medusa heads", "eagle": "an EAGLE-1 head", "draft_model": "a draft model"}


def import_head(directory: str | Path, target: Target, layers: Sequence[int] | None = None) -> Drafter:
    """The drafter in ``directory``, weights in fp32, bound to ``target``.
    layers: the auxiliary layers k (hidden states after k layers), where the files do not say them, or not for sure.
    Raises UserError for files that are missing, damaged, of another target, or of a drafter that none of ours is."""
    directory = Path(directory)
    config, tensors = read_published(directory)
    family = _family(config, tensors)
    if family in _OTHERS:
        wrong = f"{directory} is an export of {_OTHERS[family]}"
        raise UserError(f"{wrong}: expected that of {READ}, as others are not read back; give the run instead")
    try:
        return _READERS[family](config, tensors, target, layers)
    except UserError:
        raise
    except Exception as error:  # values of any type may stand where transformers and torch expect theirs
        message = f"{directory} holds no {TITLES[family]} ({reason(error)}): expected one; download it again"
        raise UserError(message) from error


def _family(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """An EAGLE-3 head may call itself LlamaForCausalLM."""
    says = f"{config.get('architectures')} {config.get('model_type')}".lower()
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind == "mtp":
            wrong = "the files hold a speculator of the type 'mtp', a Qwen3 layer with norms of queries and keys"
            raise UserError(f"{wrong}: expected {READ}; specdraft's MTP layer is MiMo's, and has none")
        if not isinstance(kind, str) or kind not in _SPECULATORS:
            raise UserError(f"the files hold a speculator of the type {kind!r}: expected {', '.join(_SPECULATORS)}")
        return _SPECULATORS[kind]
    if config.get("model_type") == MODEL_TYPE:
        return "redrafter"
    for family in ("medusa", "dspark", "dflash"):
        if family in says:
            return family
    if "eagle3" in says or any("hidden_norm" in name for name in tensors):
        return "eagle3"
    return "eagle" if any(name.endswith("fc.weight") for name in tensors) else "draft_model"
