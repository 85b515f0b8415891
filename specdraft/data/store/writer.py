"""Writing a store: any number of processes share the shards, in any number of attempts.

n = sequences of a shard, T = tokens in a sequence, a = layers, H = hidden size, m = positions of a shard whose last
hidden state is stored.

A shard's bytes depend on the contents and its number alone. Each is written under a lock of its own, which the
operating system releases when its holder dies: a killed process leaves whole shards, and others write the rest."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from specdraft.data.packing import PackedData
from specdraft.data.store import contents as layout
from specdraft.data.store.contents import INDEX, Contents, Index, Shard, read_index
from specdraft.data.store.encoding import encode, squared_error
from specdraft.errors import UserError
from specdraft.files import atomic_file, exclusive, make_directory
from specdraft.targets import Capture
from specdraft.text import fingerprint, shorten


class StoreWriter:
    """Writes the shards that are missing and that no other process is writing."""

    def __init__(self, path: Path, contents: Contents, data: Mapping[str, PackedData]) -> None:
        """Nothing is touched yet. ``data`` by split is what ``contents`` describe."""
        self.path, self.contents, self.data = path, contents, data

    def missing(self) -> list[Shard]:
        """Shards that are not written yet. Raises UserError for a store of other contents, or a foreign shard."""
        index = read_index(self.path)
        changed = index and layout.difference(self.contents.model_dump(), index.contents.model_dump())
        if changed:
            key, ours, theirs = changed
            said = f"the store {self.path} has {key}={shorten(theirs)}, and this would write {shorten(ours)}"
            raise UserError(f"{said}: choose another path, or the settings of that store")
        present = self._present()
        return [shard for shard in self.contents.shards() if shard not in present]

    def check_disk(self, max_bytes: int | None = None) -> None:
        """Raises UserError if the store would outgrow ``max_bytes``, or what is missing the disk."""
        total = self.contents.bytes()
        if max_bytes is not None and total > max_bytes:
            said = f"the store takes {_size(total)}, the limit is {_size(max_bytes)}"
            raise UserError(f"{said}: raise max_gb, choose dtype=float8 or store fewer sequences (data.limit)")
        there = sum(file.stat().st_size for file in self._present().values())
        folder = next(place for place in (self.path, *self.path.absolute().parents) if place.is_dir())
        free = shutil.disk_usage(folder).free
        if total - there > free:
            said = f"the store needs {_size(total - there)} more, the disk of {folder} has {_size(free)} free"
            raise UserError(f"{said}: choose another disk, dtype=float8 or fewer sequences (data.limit)")

    def write(self, capture: Capture, batch_size: int, show: bool = False) -> None:
        """Write what is missing, ``batch_size`` sequences at a time; afterwards the store is complete.
        Raises UserError for a store of other contents, for hidden states that are not finite, and for a full disk."""
        make_directory(self.path)
        missing = self.missing()
        self._begin()
        bar = tqdm(
            total=sum(map(self._tokens, self.contents.shards())),
            initial=sum(map(self._tokens, set(self.contents.shards()) - set(missing))),
            desc=f"hidden states to {self.path}",
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
        with self._exclusive(prefix, f".{prefix}-*.tmp", wait=wait) as held:
            if held and any(self.path.glob(f"{prefix}-*.safetensors")):
                bar.update(self._tokens(shard))
            elif held:
                data = self._encoded(shard, capture, batch_size, bar)
                self._save(f"{prefix}-{fingerprint(data)}.safetensors", [data])
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

    def _present(self) -> dict[Shard, Path]:
        """The shards that are there. Raises UserError if one is another store's."""
        places = {_prefix(shard): shard for shard in self.contents.shards()}
        found: dict[Shard, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            if shard := places.get(file.stem.rpartition("-")[0]):
                if read_about(file)["store"] != self.contents.fingerprint:
                    said = f"{file} belongs to another store: expected shards of this one"
                    raise UserError(f"{said}; take that file away")
                found[shard] = file
        return {shard: found[shard] for shard in places.values() if shard in found}

    def _begin(self) -> None:
        with self._exclusive(INDEX, f".{INDEX}.*.tmp", ".*-sequences-*.tmp", wait=True):
            if read_index(self.path) is None:
                self._write_index(None, {})
            for name, split in self.contents.splits.items():
                if not (self.path / split.file).exists():
                    self._save(split.file, layout.sequence_bytes(self.data[name]))

    def _complete(self) -> None:
        shards: dict[str, list[str]] = {split: [] for split in self.contents.splits}
        sums = {"aux": (0.0, 0.0), "last": (0.0, 0.0)}
        for shard, file in self._present().items():
            shards[shard.split].append(file.name)
            for name, (error, square) in read_about(file)["errors"].items():
                sums[name] = sums[name][0] + error, sums[name][1] + square
        errors = {name: math.sqrt(error / square) for name, (error, square) in sums.items() if square}
        # A process killed between a whole shard and the release of its lock has left the lock's file.
        with self._exclusive(INDEX, *(f".{split}-*.lock" for split in self.contents.splits), wait=True):
            self._write_index(shards, errors)

    def _write_index(self, shards: dict[str, list[str]] | None, relative_error: dict[str, float]) -> None:
        contents = self.contents
        index = Index(fingerprint=contents.fingerprint, contents=contents, relative_error=relative_error, shards=shards)
        self._save(INDEX, [(json.dumps(index.model_dump(), indent=2) + "\n").encode()])

    @contextmanager
    def _exclusive(self, name: str, *leftovers: str, wait: bool) -> Iterator[bool]:
        """Hold the lock of that name; ``leftovers``: patterns of what a killed process has half written, which goes."""
        lock = self.path / f".{name}.lock"
        with exclusive(lock, wait) as held:
            for pattern in leftovers if held else ():
                for left in self.path.glob(pattern):
                    left.unlink(missing_ok=True)
            try:
                yield held
            finally:
                if held:
                    lock.unlink(missing_ok=True)

    def _save(self, name: str, data: Iterable[bytes]) -> None:
        try:
            with atomic_file(self.path / name) as temporary, temporary.open("wb") as file:
                file.writelines(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            said = f"cannot write {self.path / name} ({error.strerror})"
            raise UserError(f"{said}: make room or mend the disk and start again; what is written stays") from error

    def _tokens(self, shard: Shard) -> int:
        return (shard.stop - shard.first) * self.contents.splits[shard.split].sequence_length


def read_about(file: Path) -> dict[str, Any]:
    """A shard's description of itself. Raises UserError if it is damaged or no shard."""
    try:
        with safe_open(file, framework="pt") as opened:
            return json.loads(opened.metadata()["specdraft"])
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        said = f"{file} is damaged or no shard ({error})"
        raise UserError(f"{said}: delete it and write the store again, which replaces it") from error


def _prefix(shard: Shard) -> str:
    return f"{shard.split}-{shard.number:05d}"


def _size(size: int) -> str:
    return f"{size / 1e9:,.3g} GB"
