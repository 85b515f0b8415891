"""What a store holds, which decides the names, the shapes and the number of its files.

R = rows of a split, T = tokens in a row, a = layers, H = hidden size.

    index.json                         the contents, and once all is written the list of shards
    train-rows-CHECKSUM.safetensors    the packed rows: ids, which are to be learned, positions, documents
    train-00000-CHECKSUM.safetensors   hidden states of the first ``rows_per_shard`` rows, and so on

A file has its checksum in its name: data and checksum appear in one rename, and a file is whole or absent. A store
without a list of shards is unfinished.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specdraft.data.packing import Rows
from specdraft.data.store.encoding import DTYPES, bytes_per_vector
from specdraft.data.store.rows import survey
from specdraft.errors import UserError
from specdraft.files import read_json

if TYPE_CHECKING:
    from specdraft.targets import Target

INDEX, VERSION = "index.json", 2
SHARD_NAME = re.compile(r"(\w+)-(\d{5,})-([0-9a-f]{16})\.safetensors")
ROWS_NAME = re.compile(r"(\w+)-rows-([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True)
class SplitContents:
    """A split's rows; ``asked`` of their positions have their last hidden state stored. ``about`` travels along."""

    rows: int
    row_length: int
    asked: int
    file: str
    about: dict[str, Any]


class Shard(NamedTuple):
    """Rows ``first`` up to ``stop`` of a split."""

    split: str
    number: int
    first: int
    stop: int


@dataclass(frozen=True)
class Contents:
    """All that decides the bytes of a store. ``settings``: those of the data, ``every_last``: whether the last hidden
    state of every position is there, or only where the next token is to be learnt."""

    target: dict[str, Any]
    tokenizer: str
    layers: list[int]
    hidden_size: int
    dtype: str
    every_last: bool
    rows_per_shard: int
    settings: dict[str, Any]
    splits: dict[str, SplitContents]

    @property
    def fingerprint(self) -> str:
        """A hash, which every shard carries."""
        return checksum(json.dumps(asdict(self), sort_keys=True).encode())

    def shards(self) -> Iterator[Shard]:
        """All shards, split by split."""
        for name, split in self.splits.items():
            for number, first in enumerate(range(0, split.rows, self.rows_per_shard)):
                yield Shard(name, number, first, min(split.rows, first + self.rows_per_shard))

    def bytes(self) -> int:
        """Bytes of all hidden states; headers and rows are a thousandth of that."""
        aux = sum(split.rows * split.row_length for split in self.splits.values()) * len(self.layers)
        last = sum(split.asked for split in self.splits.values())
        return (aux + last) * bytes_per_vector(self.dtype, self.hidden_size)


def describe(
    target: "Target",
    layers: Sequence[int],
    every_last: bool,
    dtype: str,
    rows: Mapping[str, Rows],
    settings: Mapping[str, Any],
    about: Mapping[str, Mapping[str, Any]],
    shard_bytes: int = 2**28,
) -> Contents:
    """The contents of a store of ``rows`` by split, with ``settings`` and ``about`` (by split) JSON-able.

    Raises UserError for an unknown dtype or shards of no size.
    """
    if shard_bytes < 1:
        raise UserError(f"the size of a shard is {shard_bytes} bytes: expected a positive number")
    row_length = max(split.row_length for split in rows.values())
    row_bytes = row_length * (len(layers) + 1) * bytes_per_vector(dtype, target.hidden_size)
    splits = {}
    for name, split in rows.items():
        found = survey(name, split, every_last)
        splits[name] = SplitContents(len(split), split.row_length, found.asked, found.file, dict(about[name]))
    return Contents(
        asdict(target.identity),
        tokenizer_hash(target.tokenizer),
        list(layers),
        target.hidden_size,
        dtype,
        every_last,
        max(1, shard_bytes // row_bytes),
        json.loads(json.dumps(settings)),
        splits,
    )


def checksum(data: bytes) -> str:
    """16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of vocabulary and chat template; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    decisive = [sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    return checksum(json.dumps(decisive).encode())


class Index(NamedTuple):
    """``index.json``: shards by split, None as long as the store is unfinished; errors of the dtype by tensor."""

    contents: Contents
    shards: dict[str, list[str]] | None
    relative_error: dict[str, float]

    def text(self) -> str:
        """As it is written."""
        index = {
            "version": VERSION,
            "fingerprint": self.contents.fingerprint,
            "contents": asdict(self.contents),
            "relative_error": self.relative_error,
            "shards": self.shards,
        }
        return json.dumps(index, indent=2) + "\n"


def read_index(path: Path) -> Index | None:
    """The index of the store at ``path``, None if there is none. Raises UserError if it is damaged."""
    file = path / INDEX
    if not file.is_file():
        return None
    index = read_json(file)
    try:
        fields = dict(index["contents"])
        fields["splits"] = {name: SplitContents(**split) for name, split in fields["splits"].items()}
        contents = Contents(**fields)
        found = Index(contents, index["shards"], index["relative_error"])
        whole = index["version"] == VERSION and index["fingerprint"] == contents.fingerprint and _is_sound(found)
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        whole = False
    if not whole:
        raise UserError(
            f"{file} is damaged or of another version: expected an index of version {VERSION} as it was written; "
            "restore it, or write the store anew"
        )
    return found


def _is_sound(index: Index) -> bool:
    """Whether all that is read of an index has the type and the range that it is written with."""
    contents, shards = index.contents, index.shards
    about = contents.target
    texts = [contents.tokenizer, contents.dtype, *(about[key] for key in ("name", "config_hash", "weights_hash"))]
    numbers = [contents.hidden_size, contents.rows_per_shard]
    for split in contents.splits.values():
        texts.append(split.file)
        numbers += [split.rows, split.row_length]
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int and 1 <= number < 2**40 for number in numbers)
        and all(type(split.asked) is int and isinstance(split.about, dict) for split in contents.splits.values())
        and all(type(layer) is int for layer in contents.layers)
        and isinstance(contents.layers, list)
        and contents.dtype in DTYPES
        and isinstance(contents.every_last, bool)
        and isinstance(contents.settings, dict)
        and isinstance(index.relative_error, dict)
        and (shards is None or _are_sound(shards, contents))
    )


def _are_sound(shards: Any, contents: Contents) -> bool:
    """Whether there is a name for every shard of the contents."""
    return shards.keys() == contents.splits.keys() and all(
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and len(names) == -(-contents.splits[split].rows // contents.rows_per_shard)
        for split, names in shards.items()
    )


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """The first key whose values differ, with both; nested keys are joined by dots."""
    for key in {**ours, **theirs}:
        mine, other = ours.get(key), theirs.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            found = difference(mine, other, f"{prefix}{key}.")
            if found is not None:
                return found
        elif mine != other:
            return f"{prefix}{key}", mine, other
    return None
