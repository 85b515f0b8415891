"""Reading hidden states from a store beside reading its files, in every dtype.

The embedded target reads rows of real Python, and its hidden states are written. Then, in turns, the shards are read as
plain files from front to back, and rows are read by the store in random order, as training reads them. Rates are bytes
on disk per second. Cold: the files' pages were dropped from the page cache before. First touch: cold, and every shard's
checksum is verified on the way, which happens once on a node.
"""

import copy
import itertools
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import alternate, median_ratio, print_table, scratch
from specdraft.data.packing import PackedTensor, pack
from specdraft.data.places import Folder
from specdraft.data.sources import stdlib
from specdraft.data.store import Store, StoreWriter, describe
from specdraft.data.store.encoding import DTYPES
from specdraft.data.tokenization.chat import Example
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch

SPLIT = "train"
_DISTINCT = 32  # rows that the target reads; the others repeat them
_BATCH = 4  # rows read at a time
_SHARD = 32 * 2**20


def rows_of_python(target: Target, count: int, length: int) -> Batch:
    """``count`` packed rows of the standard library's own source, all supervised."""
    ids: list[int] = []
    for path in stdlib.files():
        ids += target.tokenizer(stdlib.read(path))["input_ids"]
        if len(ids) >= count * length:
            break
    texts = [ids[start : start + length] for start in range(0, count * length, length)]
    return pack([Example(text, [True] * length) for text in texts], length)[0]


class Replay:
    """Stands in for the target where writing is timed: the features of row after row, over and over."""

    def __init__(self, known: list[Features]) -> None:
        self.turns = itertools.cycle(known)

    def __call__(self, input_ids: Tensor, position_ids: Tensor) -> Features:
        """Of the next row, whatever is asked."""
        return next(self.turns)


def timed(action: Callable[[], object], size: int) -> float:
    """MB/s of an action that reads ``size`` bytes."""
    started = time.perf_counter()
    action()
    return size / 1e6 / (time.perf_counter() - started)


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache; nothing may have them mapped."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_files(files: list[Path]) -> None:
    """From front to back into one buffer."""
    buffer = bytearray(2**23)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def read_rows(store: Store, dtype: torch.dtype, batch_size: int) -> None:
    """Every row once, in random order."""
    order = torch.randperm(len(store.data[SPLIT]), generator=torch.Generator().manual_seed(0))
    for indices in order.split(batch_size):
        store.read(SPLIT, indices.tolist()).decode(dtype)


def measure(path: Path, dtype: torch.dtype, batch_size: int, rounds: int) -> dict[str, list[float]]:
    """MB/s of each way to read the store at ``path``, by round; ``dtype`` is that of the features."""
    verified = Store(path)
    files = [path / name for name in verified.shards[SPLIT]]
    size = sum(file.stat().st_size for file in files)
    read_rows(copy.copy(verified), dtype, batch_size)  # a copy maps the files anew and knows what is verified

    def cold(read: Callable[[], object]) -> float:
        forget(files)
        return timed(read, size)

    def first_touch() -> float:
        for file in files:
            os.utime(file)  # what a node remembers of it no longer counts
        return cold(lambda: read_rows(Store(path), dtype, batch_size))

    return alternate(
        {
            "file, cold": lambda: cold(lambda: read_files(files)),
            "store, cold": lambda: cold(lambda: read_rows(copy.copy(verified), dtype, batch_size)),
            "store, first touch": first_touch,
            "file, warm": lambda: timed(lambda: read_files(files), size),
            "store, warm": lambda: timed(lambda: read_rows(copy.copy(verified), dtype, batch_size), size),
        },
        rounds,
    )


def compare_dtypes(target: Target, count: int, rounds: int, length: int = 512) -> dict[str, Any]:
    """Write and read ``count`` rows in every dtype, print a table and return the figures."""
    layers = target.default_layers()
    distinct = rows_of_python(target, _DISTINCT, length)
    with torch.inference_mode():
        known = [
            target.features(distinct.input_ids[i : i + 1], distinct.position_ids[i : i + 1], layers)
            for i in range(_DISTINCT)
        ]
    repeats = -(-count // _DISTINCT)
    rows = PackedTensor.of(Batch(*(value.repeat(repeats, 1)[:count] for value in vars(distinct).values())))
    results: dict[str, Any] = {}
    table: dict[str, dict[str, str]] = {}
    with scratch() as folder:
        for name in DTYPES:
            path = Path(folder) / name
            contents = describe(target, layers, True, name, {SPLIT: rows}, {}, {SPLIT: {}}, shard_bytes=_SHARD)
            writer = StoreWriter(Folder(path), contents, {SPLIT: rows})
            writing = timed(partial(writer.write, Replay(known), 1), contents.bytes())
            rates = measure(path, target.dtype, _BATCH, rounds)
            errors = Store(path).relative_error
            per_token = contents.bytes() / (len(rows) * rows.sequence_length)
            ratio = {kind: median_ratio(rates[f"store, {kind}"], rates[f"file, {kind}"]) for kind in ("cold", "warm")}
            results[name] = {
                "bytes_per_token": per_token,
                "relative_error": errors,
                "megabytes": contents.bytes() / 1e6,
                "write_megabytes_per_second": writing,
                "read_megabytes_per_second": rates,
                "store_over_file": ratio,
            }
            medians = {way: f"{statistics.median(rate):.0f}" for way, rate in rates.items()}
            shown = {"bytes/token": f"{per_token:.0f}", **{what: f"{error:.2g}" for what, error in errors.items()}}
            shown |= medians | {"store / file, cold": f"{ratio['cold']:.2f}x", "warm": f"{ratio['warm']:.2f}x"}
            table[name] = shown
    header = ["MB/s; relative error of aux and last", *next(iter(table.values()))]
    print_table(header, [[name, *row.values()] for name, row in table.items()])
    return results
