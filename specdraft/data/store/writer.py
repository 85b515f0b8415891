"""Writing a store: any number of processes, each its own shards, in any number of attempts.

n = rows of a shard, T = tokens in a row, a = layers, H = hidden size, m = positions of a shard that are asked.

What a shard holds depends on the contents and its number alone. A killed process leaves whole shards behind, the next
attempt writes those that are missing, and whoever finds none missing completes the index: ranks never talk.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from specdraft.data.packing import Rows
from specdraft.data.store.contents import (
    INDEX,
    ROWS_NAME,
    SHARD_NAME,
    Contents,
    Index,
    Shard,
    checksum,
    difference,
    read_index,
)
from specdraft.data.store.encoding import encode, squared_error
from specdraft.data.store.rows import asked, row_bytes
from specdraft.errors import UserError
from specdraft.files import atomic_file, exclusive, make_directory
from specdraft.targets import Capture


class StoreWriter:
    """Writes the shards of one rank: those whose number leaves ``rank`` when divided by ``world_size``."""

    def __init__(
        self, path: Path, contents: Contents, rows: Mapping[str, Rows], rank: int = 0, world_size: int = 1
    ) -> None:
        """Nothing is touched yet. ``rows`` by split are those that ``contents`` describe."""
        self.path, self.contents, self.rows = path, contents, rows
        self.rank, self.world_size = rank, world_size

    def missing(self) -> list[Shard]:
        """Shards that no rank has written yet. Raises UserError for a store of other contents, or a foreign shard."""
        index = read_index(self.path)
        if index is not None:
            changed = difference(asdict(self.contents), asdict(index.contents))
            if changed is not None:
                key, ours, theirs = changed
                raise UserError(
                    f"the store {self.path} has {key}={_shown(theirs)}, and this would write {_shown(ours)}: "
                    "choose another path, or the settings of that store"
                )
        present = self._present()
        return [shard for shard in self.contents.shards() if (shard.split, shard.number) not in present]

    def check_disk(self, max_bytes: int | None = None) -> None:
        """Raises UserError if the store would outgrow ``max_bytes``, or what is missing the disk."""
        total = self.contents.bytes()
        if max_bytes is not None and total > max_bytes:
            raise UserError(
                f"the store takes {_size(total)}, the limit is {_size(max_bytes)}: "
                "raise max_gb, choose dtype=float8 or store fewer rows (data.limit)"
            )
        there = sum(file.stat().st_size for file in self._present().values())
        folder = next(place for place in (self.path, *self.path.absolute().parents) if place.is_dir())
        free = shutil.disk_usage(folder).free
        if total - there > free:
            raise UserError(
                f"the store needs {_size(total - there)} more, the disk of {folder} has {_size(free)} free: "
                "choose another disk, dtype=float8 or fewer rows (data.limit)"
            )

    def write(self, capture: Capture, batch_size: int, show: bool = False) -> bool:
        """Write what is missing of this rank's share, ``batch_size`` rows at a time; ``show`` a progress bar.

        Returns whether the store is complete. Raises UserError if another process writes this share, for a store of
        other contents, for hidden states that are not finite, and for a disk that is full.
        """
        make_directory(self.path)
        with self._alone():
            missing = self.missing()
            self._begin()
            share = [shard for shard in self.contents.shards() if self._mine(shard.number)]
            todo = [shard for shard in missing if self._mine(shard.number)]
            bar = tqdm(
                total=sum(map(self._tokens, share)),
                initial=sum(map(self._tokens, set(share) - set(todo))),
                desc=f"hidden states to {self.path}",
                unit=" tokens",
                unit_scale=True,
                dynamic_ncols=True,
                disable=not show,
            )
            with bar, torch.inference_mode():
                for shard in todo:
                    name, data = self._encoded(shard, capture, batch_size, bar)
                    self._save(name, [data])
            return self._complete()

    # --- a shard ----------------------------------------------------------------------------------------------------

    def _encoded(self, shard: Shard, capture: Capture, batch_size: int, bar: tqdm) -> tuple[str, bytes]:
        parts: dict[str, list[Tensor]] = {}
        errors = {"aux": (0.0, 0.0), "last": (0.0, 0.0)}
        rows, layers = self.rows[shard.split], self.contents.layers
        for first in range(shard.first, shard.stop, batch_size):
            here = range(first, min(shard.stop, first + batch_size))
            batch = rows.__getitems__(here)
            features = capture(batch.input_ids, batch.position_ids)
            kept = asked(batch, self.contents.every_last).to(features.last.device)
            # [B, T, a*H] -> [B, T, a, H], so that every layer has a scale of its own; [B, T, H] -> [m, H]
            aux = features.aux.unflatten(-1, (len(layers), -1)) if layers else None
            for name, values in (("aux", aux), ("last", features.last[kept])):
                if values is None:
                    continue
                encoded = encode(values, self.contents.dtype)
                error = squared_error(values, encoded)
                if not math.isfinite(sum(error)):
                    raise UserError(
                        f"the target's hidden states are not finite in rows {first} to {here.stop - 1} of the "
                        f"{shard.split} split, or do not fit {self.contents.dtype}: expected finite numbers; load the "
                        "target with target.dtype=bfloat16 or float32"
                    )
                errors[name] = (errors[name][0] + error[0], errors[name][1] + error[1])
                parts.setdefault(name, []).append(encoded.codes.cpu())
                if encoded.scale is not None:
                    parts.setdefault(f"{name}_scale", []).append(encoded.scale.cpu())
            bar.update(batch.input_ids.numel())
        about = {"store": self.contents.fingerprint, "split": shard.split, "shard": shard.number, "errors": errors}
        # A single entry, because safetensors writes several in any order, and equal shards should be equal files.
        data = save({name: torch.cat(tensors) for name, tensors in parts.items()}, {"specdraft": json.dumps(about)})
        return f"{shard.split}-{shard.number:05d}-{checksum(data)}.safetensors", data

    def _save(self, name: str, data: Iterable[bytes]) -> None:
        try:
            with atomic_file(self.path / name) as temporary, temporary.open("wb") as file:
                file.writelines(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"cannot write {self.path / name} ({error.strerror}): make room or mend the disk and start again; "
                "what is written stays"
            ) from error

    # --- the store --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The index of an unfinished store and the rows are of the first rank."""
        for file in self.path.glob(".*.tmp"):  # left behind by a kill
            shard, rows = SHARD_NAME.match(file.name[1:]), ROWS_NAME.match(file.name[1:])
            if (shard and self._mine(int(shard[2]))) or (rows and self.rank == 0):
                file.unlink(missing_ok=True)
        if self.rank > 0:
            return
        if read_index(self.path) is None:
            self._save(INDEX, [Index(self.contents, None, {}).text().encode()])
        for name, split in self.contents.splits.items():
            if not (self.path / split.file).exists():
                self._save(split.file, row_bytes(self.rows[name]))

    def _complete(self) -> bool:
        rows = (self.path / split.file for split in self.contents.splits.values())
        if self.missing() or not all(file.exists() for file in rows):
            return False
        present = self._present()
        shards: dict[str, list[str]] = {split: [] for split in self.contents.splits}
        sums = {"aux": [0.0, 0.0], "last": [0.0, 0.0]}
        for shard in self.contents.shards():
            file = present[shard.split, shard.number]
            shards[shard.split].append(file.name)
            for name, error in read_about(file)["errors"].items():
                sums[name] = [total + value for total, value in zip(sums[name], error, strict=True)]
        errors = {name: math.sqrt(error / square) for name, (error, square) in sums.items() if square}
        self._save(INDEX, [Index(self.contents, shards, errors).text().encode()])
        return True

    def _present(self) -> dict[tuple[str, int], Path]:
        """Whole shards by split and number. Raises UserError if one is another store's."""
        present = {}
        for file in sorted(self.path.glob("*.safetensors")):
            name = SHARD_NAME.fullmatch(file.name)
            if name is None:
                continue
            if read_about(file)["store"] != self.contents.fingerprint:
                raise UserError(f"{file} belongs to another store: expected shards of this one; take that file away")
            present[name[1], int(name[2])] = file
        return present

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = self.path / f".rank-{self.rank}.lock"
        with exclusive(lock, wait=False) as held:
            if not held:
                raise UserError(
                    f"another process writes the store {self.path} as rank {self.rank}: expected one process per rank; "
                    "wait for it or stop it"
                )
            try:
                yield
            finally:
                lock.unlink()

    def _mine(self, number: int) -> bool:
        return number % self.world_size == self.rank

    def _tokens(self, shard: Shard) -> int:
        return (shard.stop - shard.first) * self.contents.splits[shard.split].row_length


def read_about(file: Path) -> dict[str, Any]:
    """What a shard says of itself. Raises UserError if it is damaged or no shard."""
    try:
        with safe_open(file, framework="pt") as opened:
            return json.loads(opened.metadata()["specdraft"])
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{file} is damaged or no shard ({error}): delete it and write the store again, which replaces it"
        ) from error


def _size(size: int) -> str:
    return f"{size / 1e9:,.3g} GB"


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
