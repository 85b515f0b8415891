"""Reading a store: sequences in any order, memory-mapped, each shard's checksum verified when it is first touched.

B = batch, T = tokens, a = layers, H = hidden size, m = positions whose last hidden state is stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdraft.data.packing import PackedData, PackedTensor
from specdraft.data.places import Folder
from specdraft.data.store.contents import INDEX, difference, read_index, read_sequences, stored_positions
from specdraft.data.store.encoding import DTYPES, Encoded, decode
from specdraft.data.store.verification import verify
from specdraft.data.tokenization.chat import tokenizer_fingerprint
from specdraft.errors import UserError
from specdraft.files import member
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch
from specdraft.tensors import read_tensors

_COMMAND = "specdraft store"
_MEND = f"restore it, or delete it and run {_COMMAND} again, which writes it again"
_MAX_MAPPED = 1024  # shards; Linux allows a process some 65,000 mappings


class Store:
    """A complete store, checked when it is opened: its index, its sequences, and that no shard is missing."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if there is no store, or an unfinished or damaged one, or shards are missing."""
        index = read_index(Folder(path))
        if index is None:
            raise UserError(f"there is no store at {path}: expected a directory with {INDEX}, as {_COMMAND} writes it")
        if index.shards is None:
            raise UserError(f"the store {path} is unfinished: run {_COMMAND} again, which continues it")
        self.path, self.contents, self.shards = path, index.contents, index.shards
        self.relative_error = index.relative_error
        files = [split.file for split in self.contents.splits.values()]
        listed = {*files, *(name for names in self.shards.values() for name in names)}
        if absent := sorted(listed - {file.name for file in path.iterdir()}):
            raise UserError(
                f"the store {path} lacks {len(absent)} of its files, {absent[0]} among them: restore them, or run "
                f"{_COMMAND} again, which writes what is missing"
            )
        for file in files:
            verify(member(path, file), _MEND)
        self.data = self._map_sequences()
        self._largest = 0  # id
        # Where each sequence's last hidden states begin among those of its split, and where the last one's end.
        self._begins = {split: self._look_at(split) for split in self.data}
        self._mapped: dict[tuple[str, int], dict[str, Tensor]] = {}

    def check(self, target: Target, settings: dict[str, Any]) -> None:
        """Raises UserError unless the store is of this target, its tokenizer and these settings of the data."""
        theirs, ours, what = self.contents.target, target.identity, ""
        changed = difference(settings, self.contents.settings)
        if (theirs.config_hash, theirs.weights_hash) != (ours.config_hash, ours.weights_hash):
            what = f"belongs to the target {theirs.name!r}, whose configuration or weights are not those of {ours.name}"
        elif self.contents.tokenizer != tokenizer_fingerprint(target.tokenizer):
            what = "was written with another tokenizer or chat template than the target's"
        elif self._largest >= target.vocab_size:
            what = f"holds the token {self._largest}, and the target has {target.vocab_size}"
        elif changed is not None:
            what = f"was written with data.{changed[0]}={changed[2]}, and this run has {changed[1]}"
        if what:
            raise UserError(
                f"the store {self.path} {what}: expected a store of this target and this data; "
                f"write one with {_COMMAND}, or use the settings of that store"
            )

    @property
    def origin(self) -> "Origin":
        """What its batches say of their features."""
        return Origin(self.path, tuple(self.contents.layers), self.contents.every_last)

    def read(self, split: str, indices: Sequence[int]) -> "States":
        """What is stored of the sequences at ``indices``, copied. Raises UserError for a damaged shard."""
        kept = stored_positions(self.data[split].__getitems__(indices), self.contents.every_last)
        found = [self._of_one(split, index) for index in indices]
        parts = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        aux, last = (Encoded(parts[name], parts.get(f"{name}_scale")) for name in ("aux", "last"))
        return States(aux, last, kept.flatten().nonzero()[:, 0])

    def _of_one(self, split: str, index: int) -> dict[str, Tensor]:
        """Parts of its shard by name, those of ``aux`` with a dimension of one sequence."""
        number, place = divmod(index, self.contents.sequences_per_shard)
        shard, begins = self._shard(split, number), self._begins[split]
        begin, end = (int(begins[each] - begins[index - place]) for each in (index, index + 1))
        where = {"aux": slice(place, place + 1), "last": slice(begin, end)}
        found = {name: tensor[where[name.removesuffix("_scale")]] for name, tensor in shard.items()}
        shape = (1, self.contents.splits[split].sequence_length, 0, self.contents.hidden_size)
        return {"aux": found["last"].new_empty(shape)} | found

    def _shard(self, split: str, number: int) -> dict[str, Tensor]:
        """The shard's tensors, which stay on disk until they are read."""
        if (split, number) not in self._mapped:
            file = member(self.path, self.shards[split][number])
            verify(file, _MEND)
            if len(self._mapped) >= _MAX_MAPPED:
                self._mapped.pop(next(iter(self._mapped)))
            tensors = read_tensors(file)
            self._check_shard(file, tensors, split, number)
            self._mapped[split, number] = tensors
        return self._mapped[split, number]

    def _check_shard(self, file: Path, tensors: dict[str, Tensor], split: str, number: int) -> None:
        contents, about = self.contents, self.contents.splits[split]
        first = number * contents.sequences_per_shard
        stop = min(about.sequences, first + contents.sequences_per_shard)
        shapes: dict[str, tuple[int, ...]] = {"last": (int(self._begins[split][stop] - self._begins[split][first]),)}
        if contents.layers:
            shapes["aux"] = (stop - first, about.sequence_length, len(contents.layers))
        expected = {name: ((*shape, contents.hidden_size), DTYPES[contents.dtype]) for name, shape in shapes.items()}
        if contents.dtype == "float8":
            expected |= {f"{name}_scale": (shape, torch.float32) for name, shape in shapes.items()}
        if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} != expected:
            raise UserError(f"{file} does not hold what {INDEX} says: expected it as it was written; restore it")

    def _map_sequences(self) -> dict[str, PackedTensor]:
        splits = self.contents.splits.items()
        return {name: read_sequences(member(self.path, split.file), split) for name, split in splits}

    def _look_at(self, split: str) -> npt.NDArray[np.int64]:
        """``[R + 1]`` sums of stored last states. Raises UserError for impossible positions or documents."""
        counts = [torch.zeros(1, dtype=torch.int64)]
        for batch in self.data[split].blocks():
            if int(batch.position_ids.min()) < 0 or int(batch.document_ids.min()) < -1:
                file = self.path / self.contents.splits[split].file
                raise UserError(f"{file} holds impossible positions or documents: expected it as written; restore it")
            self._largest = max(self._largest, int(batch.input_ids.max()))
            counts.append(stored_positions(batch, self.contents.every_last).sum(1))
        return torch.cat(counts).cumsum(0).numpy()

    def __getstate__(self) -> dict[str, Any]:
        """A worker maps the files itself."""
        return self.__dict__ | {"_mapped": {}, "data": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.data = self._map_sequences()


class States(NamedTuple):
    """Hidden states as they are stored, which are moved before they are decoded: in fp8 they are half of bf16."""

    aux: Encoded  # [B, T, a, H]
    last: Encoded  # [m, H]
    places: Tensor  # [m] int64, of the last ones in [B*T]

    def decode(self, dtype: torch.dtype) -> Features:
        """Features ``[B, T, a*H]`` and ``[B, T, H]``; a last hidden state that was not stored is NaN, so that nothing
        can be learned from it by mistake."""
        batch, length, _, size = self.aux.codes.shape
        last = decode(self.last, dtype)
        if len(last) < batch * length:
            last = last.new_full((batch * length, size), torch.nan).index_copy_(0, self.places, last)
        aux = decode(self.aux, dtype) if self.aux.codes.numel() else last.new_empty(self.aux.codes.shape)
        return Features(aux.flatten(-2), last.view(batch, length, size))


class Origin(NamedTuple):
    """Where a batch's features come from, of which layers, and whether every last hidden state is there."""

    path: Path
    layers: tuple[int, ...]
    every_last: bool

    def check(self, layers: Sequence[int], every_last: bool) -> None:
        """Raises UserError if the store has not all that a drafter reads."""
        absent = set(layers) - set(self.layers)
        if absent or (every_last and not self.every_last):
            what = f"layers {sorted(absent)}" if absent else "last hidden states of prompts"
            raise UserError(
                f"the drafter reads {what} of the target, which the store {self.path} does not hold: write a store for "
                f"this model with {_COMMAND} (every_last=true serves all models of its layers), or set data.store=null"
            )


@dataclass
class StoredBatch(Batch):
    """A batch with its stored features; ``read`` are the ids that they belong to."""

    origin: Origin
    read: Tensor  # [B, T] int64
    states: States

    def features(self, target: Target, layers: Sequence[int], every_last: bool = True) -> Features:
        """The stored features of ``layers``.
        Raises UserError if the store has not all that the drafter reads, or the drafter has changed the text."""
        self.origin.check(layers, every_last)
        path, stored, _ = self.origin
        if self.read is not self.input_ids:
            said = f"the drafter trains on text of its own, of which the store {path} holds no hidden states"
            raise UserError(f"{said}: set data.store=null, or model.drafter.on_policy=0")
        aux, last = self.states.decode(target.dtype)
        if stored == tuple(layers):
            return Features(aux, last)
        chosen = [stored.index(layer) for layer in layers]
        return Features(aux.unflatten(-1, (len(stored), -1))[..., chosen, :].flatten(-2), last)


class StoredData(PackedData):
    """Packed sequences with their features. Indices beyond the store's last give padding."""

    def __init__(self, store: Store, split: str) -> None:
        self.store, self.split = store, split
        self.sequence_length = store.data[split].sequence_length

    def __len__(self) -> int:
        return len(self.store.data[self.split])

    def __getitems__(self, indices: Sequence[int]) -> StoredBatch:
        batch, origin = self.store.data[self.split].__getitems__(indices), self.store.origin
        # Nothing is learned from padding, so that any features serve, and the last sequence is always there.
        states = self.store.read(self.split, [min(index, len(self) - 1) for index in indices])
        return StoredBatch(**vars(batch), origin=origin, read=batch.input_ids, states=states)
