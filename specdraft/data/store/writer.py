"""Writing a store: any number of processes share the shards, in any number of attempts, on a disk or in a bucket.

n = sequences of a shard, T = tokens in a sequence, a = layers, H = hidden size, m = positions of a shard whose last
hidden state is stored.

A shard's bytes depend on the contents and its number alone. Who writes it holds its name, which is free again when its
holder dies: a killed process leaves whole shards, and others write the rest."""

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from specdraft.data.packing import PackedData
from specdraft.data.places import Place
from specdraft.data.store import contents as layout
from specdraft.data.store.contents import INDEX, Contents, Index, Shard, read_index
from specdraft.data.store.encoding import encode, squared_error
from specdraft.errors import UserError
from specdraft.targets import Capture
from specdraft.text import fingerprint, reason

_HEADER = 4096  # bytes of a shard that are read to know what it says of itself
_READ_AT_A_TIME = 16  # shards; a request to a bucket takes long


class StoreWriter:
    """Writes the shards that are missing and that no other process is writing."""

    def __init__(self, place: Place, contents: Contents, data: Mapping[str, PackedData]) -> None:
        """Nothing is touched yet. ``data`` by split is what ``contents`` describe."""
        self.place, self.contents, self.data = place, contents, data
        self._abouts: dict[str, dict[str, Any]] = {}  # what shards say of themselves, by the name of the file

    def missing(self) -> list[Shard]:
        """Shards that are not written yet. Raises UserError for a store of other contents, or a foreign shard."""
        present = self._present()
        return [shard for shard in self.contents.shards() if shard not in present]

    def check_disk(self, max_bytes: int | None = None) -> None:
        """Raises UserError if the store would outgrow ``max_bytes``, or what is missing the disk."""
        total = self.contents.bytes()
        if max_bytes is not None and total > max_bytes:
            said = f"the store takes {_size(total)}, the limit is {_size(max_bytes)}"
            raise UserError(f"{said}: raise max_gb, choose dtype=float8 or store fewer sequences (data.limit)")
        there = sum(map(self.place.size, self._present().values()))
        free = self.place.free()
        if free is not None and total - there > free:
            said = f"the store needs {_size(total - there)} more, the disk of {self.place} has {_size(free)} free"
            raise UserError(f"{said}: choose another disk, dtype=float8 or fewer sequences (data.limit)")

    def write(self, capture: Capture, batch_size: int, show: bool = False) -> None:
        """Write what is missing, ``batch_size`` sequences at a time; afterwards the store is complete.
        Raises UserError for a store of other contents, for hidden states that are not finite, and for a full disk."""
        missing = self.missing()
        self._begin()
        bar = tqdm(
            total=sum(map(self._tokens, self.contents.shards())),
            initial=sum(map(self._tokens, set(self.contents.shards()) - set(missing))),
            desc=f"hidden states to {self.place}",
            unit=" tokens",
            unit_scale=True,
            dynamic_ncols=True,
            disable=not show,
        )
        with bar, torch.inference_mode():
            # First the shards that no other process is writing, then those that it has left or is finishing.
            waiting = [shard for shard in missing if not self._write_alone(shard, capture, batch_size, bar, wait=False)]
            for shard in waiting:
                self._write_alone(shard, capture, batch_size, bar, wait=True)
        self._complete()

    def _write_alone(self, shard: Shard, capture: Capture, batch_size: int, bar: tqdm, wait: bool) -> bool:
        """Write the shard unless it is there; False if another process is at it and we do not ``wait``."""
        prefix = _prefix(shard)
        with self.place.hold(prefix, f".{prefix}-*.tmp", wait=wait) as held:
            if held and any(fnmatch(name, f"{prefix}-*.safetensors") for name in self.place.names()):
                bar.update(self._tokens(shard))
            elif held:
                data = self._encoded(shard, capture, batch_size, bar)
                self.place.save(f"{prefix}-{fingerprint(data)}.safetensors", [data])
            return held

    def _encoded(self, shard: Shard, capture: Capture, batch_size: int, bar: tqdm) -> bytes:
        parts: dict[str, list[Tensor]] = {}
        errors = {"aux": (0.0, 0.0), "last": (0.0, 0.0)}
        layers = self.contents.layers
        for first in range(shard.first, shard.stop, batch_size):
            here = range(first, min(shard.stop, first + batch_size))
            batch = self.data[shard.split].__getitems__(here)
            features = capture(batch.input_ids, batch.position_ids)
            kept = layout.stored_positions(batch, self.contents.every_last).to(features.last.device)
            # [B, T, a*H] -> [B, T, a, H], so that every layer has a scale of its own; [B, T, H] -> [m, H]
            states = {"aux": features.aux.unflatten(-1, (len(layers), -1))} if layers else {}
            for name, values in (states | {"last": features.last[kept]}).items():
                encoded = encode(values, self.contents.dtype)
                error = squared_error(values, encoded)
                if not math.isfinite(sum(error)):
                    raise UserError(
                        f"the target's hidden states are not finite in sequences {first} to {here.stop - 1} of the "
                        f"{shard.split} split, or do not fit {self.contents.dtype}: load it with target.dtype=float32"
                    )
                errors[name] = (errors[name][0] + error[0], errors[name][1] + error[1])
                parts.setdefault(name, []).append(encoded.codes.cpu())
                if encoded.scale is not None:
                    parts.setdefault(f"{name}_scale", []).append(encoded.scale.cpu())
            bar.update(batch.input_ids.numel())
        about = {"store": self.contents.fingerprint, "split": shard.split, "shard": shard.number, "errors": errors}
        # A single entry, because safetensors writes several in any order, and equal shards should be equal files.
        return save({name: torch.cat(tensors) for name, tensors in parts.items()}, {"specdraft": json.dumps(about)})

    def _present(self) -> dict[Shard, str]:
        """The files of the shards that are there. Raises UserError if one, or the index, is another store's."""
        layout.check_same(self.place, self.contents.model_dump())
        places = {_prefix(shard): shard for shard in self.contents.shards()}
        files = [name for name in self.place.names() if name.endswith(".safetensors")]
        files = [name for name in files if name.rpartition("-")[0] in places]
        unread = [name for name in files if name not in self._abouts]
        with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
            self._abouts.update(zip(unread, pool.map(lambda name: read_about(self.place, name), unread), strict=True))
        for name in files:
            if self._abouts[name]["store"] != self.contents.fingerprint:
                said = f"{self.place}/{name} belongs to another store: expected shards of this one"
                raise UserError(f"{said}; take that file away")
        found = {places[name.rpartition("-")[0]]: name for name in files}
        return {shard: found[shard] for shard in places.values() if shard in found}

    def _begin(self) -> None:
        with self.place.hold(INDEX, f".{INDEX}.*.tmp", ".*-sequences-*.tmp"):
            if read_index(self.place) is None:
                self._write_index(None, {})
            present = self.place.names()
            for name, split in self.contents.splits.items():
                if split.file not in present:
                    self.place.save(split.file, layout.sequence_bytes(self.data[name]))

    def _complete(self) -> None:
        shards: dict[str, list[str]] = {split: [] for split in self.contents.splits}
        sums = {"aux": (0.0, 0.0), "last": (0.0, 0.0)}
        for shard, file in self._present().items():
            shards[shard.split].append(file)
            for name, (error, square) in self._abouts[file]["errors"].items():
                sums[name] = sums[name][0] + error, sums[name][1] + square
        errors = {name: math.sqrt(error / square) for name, (error, square) in sums.items() if square}
        with self.place.hold(INDEX):
            self._write_index(shards, errors)
            self.place.forget(*(f"{split}-*" for split in self.contents.splits))

    def _write_index(self, shards: dict[str, list[str]] | None, relative_error: dict[str, float]) -> None:
        contents = self.contents
        index = Index(fingerprint=contents.fingerprint, contents=contents, relative_error=relative_error, shards=shards)
        self.place.save(INDEX, [(json.dumps(index.model_dump(), indent=2) + "\n").encode()])

    def _tokens(self, shard: Shard) -> int:
        return (shard.stop - shard.first) * self.contents.splits[shard.split].sequence_length


def read_about(place: Place, name: str) -> dict[str, Any]:
    """A shard's description of itself, which is at its beginning. Raises UserError if it is damaged or no shard."""
    try:
        size = place.size(name)
        begins = (place.read(name, 0, min(size, _HEADER)) or b"") if size else b""
        length = int.from_bytes(begins[:8], "little")
        if not 0 < length <= size - 8:
            raise ValueError("it is cut off")
        whole = begins if 8 + length <= len(begins) else place.read(name, 0, 8 + length) or b""
        header = json.loads(whole[8 : 8 + length])
        about = json.loads(header.pop("__metadata__")["specdraft"])
        end = max(tensor["data_offsets"][1] for tensor in header.values())
        if size != 8 + length + end:
            raise ValueError("it is cut off")
        return about
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        said = f"{place}/{name} is damaged or no shard ({reason(error)})"
        raise UserError(f"{said}: delete it and write the store again, which replaces it") from error


def _prefix(shard: Shard) -> str:
    return f"{shard.split}-{shard.number:05d}"


def _size(size: int) -> str:
    return f"{size / 1e9:,.3g} GB"
