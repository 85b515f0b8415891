"""What is checked: a checkpoint of ours, or an EAGLE-3 head as an engine loads it, and how it is to be served."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import CONFIG, find, load_drafter
from specdraft.errors import UserError
from specdraft.export.importing import import_eagle3
from specdraft.export.layout import DTYPES
from specdraft.files import read_json
from specdraft.targets import Target


@dataclass(frozen=True)
class Serving:
    """How the drafter will be served, as far as it is known; None: as it was trained.

    tokenizer: where the serving tokenizer and its chat template lie. max_model_len: the longest context, in tokens.
    dtype: of the served weights.
    """

    tokenizer: str | None = None
    system_prompt: str | None = None
    max_model_len: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter bound to its target. ``recorded``: the checkpoint's configuration; ``served``: an export's; or {}."""

    drafter: Drafter
    target: Target
    recorded: Mapping[str, Any] = field(default_factory=dict)
    served: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path, target: Target) -> "LoadedDrafter":
        """From a run, a drafter's directory, or an exported (or public) EAGLE-3 head.

        Raises UserError for what is neither, or is a head that its own files contradict.
        """
        if is_checkpoint(path):
            drafter, recorded = load_drafter(path)
            drafter.to(target.device, target.dtype)
            drafter.bind(target)
            return cls(drafter, target, recorded=recorded)
        head = import_eagle3(path, target).to(target.device, target.dtype)
        return cls(head, target, served=read_json(Path(path) / CONFIG))

    def training(self, name: str) -> Any:
        """What the checkpoint recorded of its training data, or None."""
        return self.recorded.get("extra", {}).get("data", {}).get(name)


def served_dtype(loaded: LoadedDrafter, serving: Serving) -> str:
    """In which the weights are served: as told, as an export says, or bfloat16. Raises UserError for no such dtype."""
    wanted = serving.dtype or loaded.served.get("torch_dtype") or "bfloat16"
    if wanted not in DTYPES:
        raise UserError(f"serving.dtype is {wanted!r}: expected one of {', '.join(DTYPES)}")
    return wanted


def is_checkpoint(path: str | Path) -> bool:
    """Whether ``path`` holds a checkpoint of ours rather than an engine's files. Raises UserError for neither."""
    if not (Path(path) / CONFIG).is_file():
        return bool(find(path))
    config = read_json(Path(path) / CONFIG)
    return isinstance(config, dict) and "drafter" in config
