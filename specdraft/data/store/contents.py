"""What a store holds, which decides the names, the shapes and the number of its files.

R = sequences of a split, T = tokens in a sequence, B = sequences of a batch, a = layers, H = hidden size.

    index.json                         the contents, and once all is written the list of shards
    train-sequences-CHECKSUM.npy       int32 [R, 3, T], as ``PackedTensor`` has them: ids, positions, documents
    train-00000-CHECKSUM.safetensors   hidden states of the first ``sequences_per_shard`` sequences, and so on

A file has its checksum in its name: data and checksum appear in one rename, and a file is whole or absent. A store
without a list of shards is unfinished."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from specdraft.data.packing import PackedData, PackedTensor
from specdraft.data.places import Place
from specdraft.data.store.encoding import bytes_per_vector
from specdraft.data.tokenization.chat import tokenizer_fingerprint
from specdraft.errors import UserError
from specdraft.targets import Target, TargetIdentity
from specdraft.targets.batch import Batch
from specdraft.text import fingerprint, reason, shorten

INDEX = "index.json"
VERSION: Literal[3] = 3
Size = Annotated[int, Field(ge=1, lt=2**40)]


class _Written(BaseModel):
    """A part of the index; values of other types or unknown names are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class SplitContents(_Written):
    """A split; ``last_states`` of its positions have their last hidden state stored. ``about`` is kept for training."""

    sequences: Size
    sequence_length: Size
    last_states: Annotated[int, Field(ge=0, lt=2**60)]
    file: str
    about: dict[str, Any]


class Shard(NamedTuple):
    """Sequences ``first`` up to ``stop`` of a split."""

    split: str
    number: int
    first: int
    stop: int


class Contents(_Written):
    """All that decides the bytes of a store. ``settings``: those of the data, ``every_last``: whether the last hidden
    state of every position is there, or only where the next token is to be learned."""

    target: TargetIdentity
    tokenizer: str
    layers: list[int]
    hidden_size: Size
    dtype: Literal["float32", "bfloat16", "float8"]
    every_last: bool
    sequences_per_shard: Size
    settings: dict[str, Any]
    splits: dict[str, SplitContents]

    @property
    def fingerprint(self) -> str:
        """A hash, which every shard carries."""
        return fingerprint(self.model_dump())

    def shards(self) -> Iterator[Shard]:
        """All shards, split by split."""
        for name, split in self.splits.items():
            for number, first in enumerate(range(0, split.sequences, self.sequences_per_shard)):
                yield Shard(name, number, first, min(split.sequences, first + self.sequences_per_shard))

    def bytes(self) -> int:
        """Bytes of all hidden states; headers and sequences are a thousandth of that."""
        aux = sum(split.sequences * split.sequence_length for split in self.splits.values()) * len(self.layers)
        last = sum(split.last_states for split in self.splits.values())
        return (aux + last) * bytes_per_vector(self.dtype, self.hidden_size)


class Index(_Written):
    """``index.json``: shards by split, None as long as the store is unfinished; errors of the dtype by tensor."""

    version: Literal[3] = VERSION
    fingerprint: str
    contents: Contents
    relative_error: dict[str, float]
    shards: dict[str, list[str]] | None

    @model_validator(mode="after")
    def _fits(self) -> "Index":
        if self.fingerprint != self.contents.fingerprint:
            raise ValueError("the fingerprint is another one")
        if self.shards is not None:
            size = self.contents.sequences_per_shard
            expected = {name: -(-split.sequences // size) for name, split in self.contents.splits.items()}
            if {name: len(files) for name, files in self.shards.items()} != expected:
                raise ValueError("the shards are not all listed")
        return self


def describe(
    target: Target,
    layers: Sequence[int],
    every_last: bool,
    dtype: str,
    data: Mapping[str, PackedData],
    settings: Mapping[str, Any],
    about: Mapping[str, Mapping[str, Any]],
    shard_bytes: int = 2**28,
) -> Contents:
    """The contents of a store of ``data`` by split, with ``settings`` and ``about`` (by split) JSON-able.
    Raises UserError for an unknown dtype or shards of no size."""
    if shard_bytes < 1:
        raise UserError(f"the size of a shard is {shard_bytes} bytes: expected a positive number")
    length = max(split.sequence_length for split in data.values())
    bytes_per_sequence = length * (len(layers) + 1) * bytes_per_vector(dtype, target.hidden_size)
    splits = {}
    for name, split in data.items():
        digest = hashlib.sha256()
        for part in sequence_bytes(split):
            digest.update(part)
        splits[name] = SplitContents(
            sequences=len(split),
            sequence_length=split.sequence_length,
            last_states=sum(int(stored_positions(batch, every_last).sum()) for batch in split.blocks()),
            file=f"{name}-sequences-{digest.hexdigest()[:16]}.npy",
            about=dict(about[name]),
        )
    return Contents(
        target=target.identity,
        tokenizer=tokenizer_fingerprint(target.tokenizer),
        layers=list(layers),
        hidden_size=target.hidden_size,
        dtype=dtype,  # type: ignore[arg-type]  # a name that bytes_per_vector knows
        every_last=every_last,
        sequences_per_shard=max(1, shard_bytes // bytes_per_sequence),
        settings=json.loads(json.dumps(settings)),
        splits=splits,
    )


def stored_positions(batch: Batch, every_last: bool) -> Tensor:
    """Which positions' last hidden states are stored, ``[B, T]`` bool: all, or where targets teach and heads read."""
    return torch.ones_like(batch.loss_mask) if every_last else batch.before_learned()


def sequence_bytes(data: PackedData) -> Iterator[bytes]:
    """The bytes of a split's ``.npy`` file, piece by piece: memory does not grow with them."""
    header = BytesIO()
    shape = (len(data), 3, data.sequence_length)
    np.lib.format.write_array_header_1_0(header, {"descr": "<i4", "fortran_order": False, "shape": shape})
    yield header.getvalue()
    for batch in data.blocks():
        yield PackedTensor.of(batch).tensor.numpy().astype("<i4", copy=False).tobytes()


def read_sequences(file: Path, split: SplitContents) -> PackedTensor:
    """The sequences of a file, which stay on disk until they are taken. Raises UserError if they are others."""
    try:
        mapped = np.load(file, mmap_mode="c")  # privately writable, as torch asks for
    except Exception as error:  # of the header's parser, of the system and of the mapping
        raise UserError(f"{file} is damaged ({reason(error)}): expected it as written; restore it") from error
    if getattr(mapped, "shape", None) != (split.sequences, 3, split.sequence_length) or mapped.dtype != np.int32:
        raise UserError(f"{file} does not hold the sequences that {INDEX} lists: expected it as written; restore it")
    return PackedTensor(torch.from_numpy(mapped))


def read_index(place: Place) -> Index | None:
    """The index of the store at ``place``, None if there is none. Raises UserError if it is damaged."""
    written = place.read(INDEX)
    if written is None:
        return None
    try:
        return Index.model_validate_json(written)
    except ValueError as error:  # pydantic's is one
        raise UserError(
            f"{place}/{INDEX} is damaged or of another version ({reason(error)}): expected version {VERSION} as it was "
            "written; restore it, or write the store again"
        ) from error


def check_same(place: Place, contents: Mapping[str, Any]) -> None:
    """Raises UserError if there is a store at ``place`` that has something else where ``contents``, the fields of
    ``Contents`` or some of them, say something."""
    if (index := read_index(place)) is None:
        return
    theirs = index.contents.model_dump()
    if changed := difference(contents, {key: theirs[key] for key in contents}):
        key, mine, other = changed
        said = f"the store {place} has {key}={shorten(other)}, and this would write {shorten(mine)}"
        raise UserError(f"{said}: choose another path, or the settings of that store")


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> tuple[str, Any, Any] | None:
    """The first key whose values differ, with both; nested keys are joined by dots."""
    for key in {**ours, **theirs}:
        mine, other = ours.get(key), theirs.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            if found := difference(mine, other, f"{prefix}{key}."):
                return found
        elif mine != other:
            return f"{prefix}{key}", mine, other
    return None
