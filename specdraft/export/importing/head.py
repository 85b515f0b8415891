"""Which kind of drafter a published directory holds, and who reads it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.drafters.quantization import quantize
from specdraft.errors import UserError
from specdraft.export.importing.dflash import read_dflash, read_dspark
from specdraft.export.importing.draft_model import read_draft_model
from specdraft.export.importing.eagle1 import read_eagle
from specdraft.export.importing.eagle3 import read_eagle3
from specdraft.export.importing.files import read_published
from specdraft.export.importing.medusa import read_medusa
from specdraft.export.importing.mtp import read_mtp
from specdraft.export.importing.redrafter import read_redrafter
from specdraft.export.importing.shared import refuse_layers
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
    "medusa": read_medusa,
    "eagle": read_eagle,
    "mtp": read_mtp,
}
_DRAFT_MODEL = "draft_model"
_SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_OF_MTP = ("mtp_layers.", ".eh_proj.")


def import_head(directory: str | Path, target: Target, layers: Sequence[int] | None = None) -> Drafter:
    """The drafter in ``directory``, weights in fp32, bound to ``target``. It computes with quantized weights if the
    directory holds such: with the very same codes and scales.
    layers: the auxiliary layers k (hidden states after k layers), where the files do not say them, or not for sure.
    Raises UserError for files that are missing, damaged, of another target, or of a drafter that none of ours is."""
    directory = Path(directory)
    published = read_published(directory)
    config, tensors, quantization = published
    family = _family(config, tensors)
    try:
        if family == _DRAFT_MODEL:
            refuse_layers(layers, "a draft model reads")
            drafter: Drafter = read_draft_model(directory, published, target)
        else:
            drafter = _READERS[family](config, tensors, target, layers)
        quantize(drafter, quantization)
        return drafter
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
            raise UserError(f"{wrong}: expected another drafter; specdraft's MTP layer is MiMo's, and has none")
        if not isinstance(kind, str) or kind not in _SPECULATORS:
            raise UserError(f"the files hold a speculator of the type {kind!r}: expected {', '.join(_SPECULATORS)}")
        return _SPECULATORS[kind]
    if config.get("model_type") == MODEL_TYPE:
        return "redrafter"
    if "medusa_num_heads" in config:  # of Medusa's own repository, which says neither of the two
        return "medusa"
    for family in ("medusa", "dspark", "dflash"):
        if family in says:
            return family
    if "eagle3" in says or any("hidden_norm" in name for name in tensors):
        return "eagle3"
    if any(part in name for part in _OF_MTP for name in tensors):
        return "mtp"
    return "eagle" if any(name.endswith("fc.weight") for name in tensors) else _DRAFT_MODEL
