"""Reading a store: rows in any order, memory-mapped, each shard's checksum verified when it is first touched.

B = batch, T = tokens, a = layers, H = hidden size.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from specdraft.data.store.contents import INDEX, asked, difference, read_index, tokenizer_hash
from specdraft.data.store.encoding import Encoded, decode
from specdraft.drafters.batch import Batch
from specdraft.errors import UserError
from specdraft.targets import Features

if TYPE_CHECKING:
    from specdraft.data.datamodule import PackedRows
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

_COMMAND = "python -m specdraft.data.store"
_MAX_MAPPED = 1024  # shards; Linux allows a process some 65,000 mappings


class Store:
    """A complete store, checked when it is opened: its index, its rows, and that no shard is missing."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if there is no store, or an unfinished or damaged one, or shards are missing."""
        index = read_index(path)
        if index is None:
            raise UserError(f"there is no store at {path}: expected a directory with {INDEX}, as {_COMMAND} writes it")
        if index.shards is None:
            raise UserError(f"the store {path} is unfinished: run {_COMMAND} again, which continues it")
        self.path, self.contents, self.relative_error = path, index.contents, index.relative_error
        self.shards = index.shards
        present = {file.name for file in path.iterdir()}
        rows = {name: split.file for name, split in self.contents.splits.items()}
        absent = sorted({*rows.values(), *(name for names in self.shards.values() for name in names)} - present)
        if absent:
            raise UserError(
                f"the store {path} lacks {len(absent)} of its files, {absent[0]} among them: restore them, or run "
                f"{_COMMAND} again, which writes what is missing"
            )
        self.rows = {split: self._read_rows(file) for split, file in rows.items()}
        self._asked = {split: asked(batch, self.contents.every_last) for split, batch in self.rows.items()}
        # Where each row's last hidden states begin among those of its split.
        self._begins = {}
        for split, where in self._asked.items():
            counts = where.sum(1)
            self._begins[split] = (counts.cumsum(0) - counts).tolist()
        self._mapped: dict[tuple[str, int], dict[str, Tensor]] = {}
        # Shared with the loader's workers, so that each shard is verified once and not once per worker.
        self._verified = {split: torch.zeros(len(names)).bool().share_memory_() for split, names in self.shards.items()}

    def check(self, target: "Target", settings: dict[str, Any]) -> None:
        """Raises UserError unless the store is of this target, its tokenizer and these settings of the data."""
        about, identity = self.contents.target, target.identity
        ours = (identity.config_hash, identity.weights_hash)
        if (about["config_hash"], about["weights_hash"]) != ours:
            raise UserError(
                f"the store {self.path} belongs to the target {about['name']!r}, whose configuration or weights are "
                f"not those of {identity.name!r}: expected a store of this target; write one with {_COMMAND}"
            )
        if self.contents.tokenizer != tokenizer_hash(target.tokenizer):
            raise UserError(
                f"the store {self.path} was written with another tokenizer or chat template than the target's: "
                f"expected the same; write one with {_COMMAND}"
            )
        changed = difference(settings, self.contents.settings)
        if changed is not None:
            key, ours_, theirs = changed
            raise UserError(
                f"the store {self.path} was written with data.{key}={theirs}, and this run has {ours_}: "
                "use the data settings of the store, or write another one"
            )

    def read(self, split: str, rows: Sequence[int], dtype: torch.dtype) -> Features:
        """The features of rows, ``[B, T, a*H]`` and ``[B, T, H]``.

        A last hidden state that was not stored is NaN, so that nothing can be learnt from it by mistake. Raises
        UserError for a damaged shard.
        """
        found = [self._row(split, row, dtype) for row in rows]
        return Features(torch.stack([row.aux for row in found]), torch.stack([row.last for row in found]))

    def _row(self, split: str, row: int, dtype: torch.dtype) -> Features:
        number, place = divmod(row, self.contents.rows_per_shard)
        shard = self._shard(split, number)
        where, begins = self._asked[split][row], self._begins[split]
        begin = begins[row] - begins[row - place]
        stored = _decoded(shard, "last", slice(begin, begin + int(where.sum())), dtype)  # [m, H]
        last = stored
        if not self.contents.every_last:
            last = stored.new_full((len(where), stored.shape[-1]), torch.nan)
            last[where] = stored
        if not self.contents.layers:
            return Features(last[:, :0], last)
        return Features(_decoded(shard, "aux", place, dtype).flatten(-2), last)

    def _shard(self, split: str, number: int) -> dict[str, Tensor]:
        """The shard's tensors, which stay on disk until they are read."""
        found = self._mapped.get((split, number))
        if found is None:
            file = self.path / self.shards[split][number]
            if not self._verified[split][number]:
                _verify(file)
                self._verified[split][number] = True
            if len(self._mapped) >= _MAX_MAPPED:
                self._mapped.pop(next(iter(self._mapped)))
            found = self._mapped[split, number] = load_file(file)
        return found

    def _read_rows(self, name: str) -> Batch:
        _verify(self.path / name)
        tensors = load_file(self.path / name)
        return Batch(**{key: value if value.dtype == torch.bool else value.long() for key, value in tensors.items()})

    def __getstate__(self) -> dict[str, Any]:
        """A worker maps the shards itself."""
        return self.__dict__ | {"_mapped": {}}


def _decoded(shard: dict[str, Tensor], name: str, place: int | slice, dtype: torch.dtype) -> Tensor:
    scale = shard.get(f"{name}_scale")
    return decode(Encoded(shard[name][place], None if scale is None else scale[place]), dtype)


def _verify(file: Path) -> None:
    """Raise UserError unless the file's checksum is the one in its name."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    if not file.stem.endswith(f"-{found}"):
        raise UserError(
            f"{file} is damaged: its checksum is {found}, expected the one in its name; restore it, or delete it and "
            f"run {_COMMAND} again, which writes it anew"
        )


class Origin(NamedTuple):
    """What a batch's features are: from which store, of which layers, and whether every last hidden state is there."""

    path: Path
    layers: tuple[int, ...]
    every_last: bool


@dataclass
class StoredBatch(Batch):
    """A batch that brings its features along; ``read`` are the ids that they belong to."""

    origin: Origin
    read: Tensor  # [B, T] int64
    aux: Tensor  # [B, T, a*H]
    last: Tensor  # [B, T, H]

    def features(self, target: "Target", drafter: "Drafter") -> Features:
        """The stored features of the drafter's layers.

        Raises UserError if the store has not all that the drafter reads, or the drafter has changed the text.
        """
        path, layers, every_last = self.origin
        absent = set(drafter.layers) - set(layers)
        if absent or (drafter.reads_every_last and not every_last):
            what = f"layers {sorted(absent)}" if absent else "last hidden states of prompts"
            raise UserError(
                f"the drafter reads {what} of the target, which the store {path} does not hold: write a store for this "
                f"model with {_COMMAND} (every_last=true serves all models of its layers), or set data.store=null"
            )
        if not torch.equal(self.read, self.input_ids):
            raise UserError(
                f"the drafter trains on text of its own, of which the store {path} holds no hidden states: "
                "set data.store=null, or model.drafter.on_policy=0"
            )
        if layers == drafter.layers:
            return Features(self.aux, self.last)
        if not drafter.layers:
            return Features(self.last[..., :0], self.last)
        chosen = [layers.index(layer) for layer in drafter.layers]
        return Features(self.aux.unflatten(-1, (len(layers), -1))[..., chosen, :].flatten(-2), self.last)


class StoredRows(Dataset[Batch]):
    """Packed rows with their features, taken several at a time. Rows behind the store's last are padding."""

    def __init__(self, store: Store, split: str, packed: "PackedRows", dtype: torch.dtype) -> None:
        """``packed``: the rows of the store, then those of padding. ``dtype``: of the features, the target's own."""
        self.store, self.split, self.packed, self.dtype = store, split, packed, dtype

    def __len__(self) -> int:
        """R."""
        return len(self.packed)

    def __getitem__(self, index: int) -> StoredBatch:
        """One row, as a batch of one."""
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> StoredBatch:
        """The rows at ``indices``."""
        batch, contents = self.packed.__getitems__(indices), self.store.contents
        # Nothing is learnt from padding, so that any row's features serve, and the last row is always there.
        last_row = contents.splits[self.split].rows - 1
        aux, last = self.store.read(self.split, [min(index, last_row) for index in indices], self.dtype)
        origin = Origin(self.store.path, tuple(contents.layers), contents.every_last)
        return StoredBatch(**vars(batch), origin=origin, read=batch.input_ids, aux=aux, last=last)
