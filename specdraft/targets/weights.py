"""Single weights of a target's files, read without loading the model."""

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from specdraft.errors import UserError
from specdraft.files import member, read_json
from specdraft.targets.loading import location
from specdraft.text import reason

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


class Weights:
    """The names and tensors of a checkpoint in safetensors files, in a directory or on the hub."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        """name: as ``target.name`` has it. Raises UserError if there are no such files."""
        self._where, self._revision, self._name = location(name), revision, name
        index = self._file(_INDEX)
        if index is not None:
            self._files: dict[str, str] = read_json(index)["weight_map"]
        else:
            whole = self._file(_WHOLE)
            if whole is None:
                raise UserError(f"the target {name!r} has no {_WHOLE}: expected its weights as safetensors")
            with safe_open(whole, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), _WHOLE)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def ending(self, end: str) -> str | None:
        """The name that ends so, if it is one alone: models wrap each other in prefixes."""
        found = [name for name in self._files if name == end or name.endswith(f".{end}")]
        return found[0] if len(found) == 1 else None

    def matching(self, pattern: str) -> str | None:
        """The first name, in the alphabet, that a regular expression matches as a whole."""
        return min((name for name in self._files if re.fullmatch(pattern, name)), default=None)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors. Raises UserError for one that is not there."""
        tensors = {}
        for name in names:
            file = self._file(self._files[name]) if name in self._files else None
            if file is None:
                raise UserError(f"the files of the target {self._name!r} lack {name}: expected a whole checkpoint")
            with safe_open(file, framework="pt") as opened:
                tensors[name] = opened.get_tensor(name)
        return tensors

    def _file(self, name: str) -> Path | None:
        if Path(self._where).is_dir():
            file = member(Path(self._where), name)
            return file if file.is_file() else None
        try:
            found = cached_file(self._where, name, revision=self._revision, _raise_exceptions_for_missing_entries=False)
        except Exception as error:  # the hub client raises a dozen kinds
            wanted = "a local from_pretrained directory or a reachable hub id"
            raise UserError(f"cannot read {name} of {self._name!r} ({reason(error)}): expected {wanted}") from error
        return None if found is None else Path(found)
