"""The MTP layers that targets come with: what their tensors are called, and how engines run them.

An MTP layer is a decoder layer of some kind behind two norms and a projection; a layout says which. That of MiMo
(2505.07608) is also what a target of any other architecture is given."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.weights import Weights


@dataclass(frozen=True)
class MTPLayout:
    """architecture: of a target that has such a layer, in its configuration. prefix: of its tensors, behind as many
    ``layers`` as the target has. names: what is called otherwise than in ``MTP``, by its first part. state_first:
    whether the projection reads the hidden state before the embedding. before_norm: whether the hidden state is that
    before the target's final norm. normed_again: whether a later step reads what the last norm gives, instead of what
    goes into it. shares_width: whether attention heads share the hidden size."""

    architecture: str
    prefix: str
    names: Mapping[str, str] = field(default_factory=dict)
    state_first: bool = True
    before_norm: bool = False
    normed_again: bool = True
    shares_width: bool = False

    def published(self, name: str, layers: int) -> str:
        """What files call the tensor ``name`` of an ``MTP``, for a target of so many layers."""
        first, _, rest = name.removeprefix("layer.").partition(".")
        return f"{self.prefix.format(layers=layers)}{self.names.get(first, first)}.{rest}"


LAYOUTS = {
    "mimo": MTPLayout("MiMoForCausalLM", "model.mtp_layers.0.", before_norm=True, shares_width=True),
    "glm4_moe": MTPLayout(
        "Glm4MoeForCausalLM",
        "model.layers.{layers}.",
        {
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "shared_head.norm",
        },
        state_first=False,
        normed_again=False,
    ),
}
USUAL = "mimo"
# How many such layers a configuration says that the target has.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")
# Names in files by which layers of other layouts are known; they are of other kinds too.
_OTHERS = {
    r"(.*\.)?layers\.\d+\.eh_proj\.weight": "DeepSeek-V3",
    r"mtp\..*": "Qwen3-Next",
    r"(.*\.)?mtp(_\w+)?\..*": "a kind that is not known here",
}


def layout_of(target: Target) -> tuple[str, bool]:
    """The layout of a layer for ``target``, and whether the target claims to have one of that layout itself."""
    config: Any = target.model.config
    for name, layout in LAYOUTS.items():
        if layout.architecture in (getattr(config, "architectures", None) or (target.architecture,)):
            return name, name == USUAL or _claims(target)
    return USUAL, False


def refuse_others(target: Target) -> None:
    """Raises UserError if the target's files hold an MTP layer of a layout that is not in ``LAYOUTS``."""
    name, title = next(_of_others(target), (None, None))
    if name is not None:
        known = " and ".join(layout.architecture.removesuffix("ForCausalLM") for layout in LAYOUTS.values())
        found = f"the target {target.identity.name!r} has an MTP layer in the layout of {title} ({name})"
        raise UserError(f"{found}: expected that of {known}; model.drafter.start=scratch trains another one")


def _of_others(target: Target) -> Iterator[tuple[str, str]]:
    if not _claims(target):
        return
    try:
        files = Weights(target.identity.name, target.identity.revision)
    except UserError:  # a target in memory has none
        return
    for pattern, title in _OTHERS.items():
        if (name := files.matching(pattern)) is not None:
            yield name, title


def _claims(target: Target) -> bool:
    return any((getattr(target.config, key, None) or 0) > 0 for key in _COUNTS)
