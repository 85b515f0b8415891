"""Records of local files and of data sets by name, one after the other, and an index to read each of them again.

A line of JSON is found again by the byte it begins at. Other records are copied into a temporary file first ($TMPDIR
says where): reading a Parquet file or a remote data set out of its order takes far longer."""

import json
import pickle
import struct
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specdraft.data.sources.base import SPLITS
from specdraft.errors import UserError
from specdraft.files import embedded
from specdraft.text import reason

_SUFFIXES = (".jsonl", ".json", ".parquet")
# What is known of a record: its digest, its split, its file (_COPIED: the temporary one), its line, where it begins.
_ROW = struct.Struct("<16sbiqq")
_COLUMNS = np.dtype([("digest", "u1", 16), ("split", "i1"), ("where", f"V{_ROW.size - 17}")])
_COPIED = -1


class Line(NamedTuple):
    """The line ``number`` of a file, which begins at byte ``offset``."""

    path: Path
    number: int
    offset: int


class Record(NamedTuple):
    """A JSON object and where it stands; ``error`` says why there is none. ``line``: where to read it again at once."""

    origin: str
    fields: dict[str, Any]
    error: str = ""
    line: Line | None = None


def read_records(path: str, subset: str | None, dataset_split: str, streaming: bool) -> Iterator[Record]:
    """Records of a file, of all such files below a folder, or of a ``datasets`` name. Raises UserError.
    JSON Lines and Parquet are read piece by piece. The other three arguments are for names alone."""
    place = embedded(path) or Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.suffix in _SUFFIXES)
        if not files:
            raise UserError(f"the folder {path} holds no data: expected files that end in {', '.join(_SUFFIXES)}")
        for file in files:
            yield from _read_file(file)
    elif place.is_file():
        yield from _read_file(place)
    elif place.suffix in _SUFFIXES or path.startswith((".", "/", "~")):
        raise UserError(f"the data {path} does not exist: check the path")
    else:
        yield from _read_dataset(path, subset, dataset_split, streaming)


def read_lines(path: Path) -> Iterator[Record]:
    """The records of a JSON Lines file; empty lines are passed over."""
    offset = 0
    with path.open("rb") as file:  # lines by \n alone: JSON strings may hold U+2028 and its like unescaped
        for number, text in enumerate(file, start=1):
            if text.strip():
                yield _parse(Line(path, number, offset), text)
            offset += len(text)


def _parse(line: Line, text: bytes) -> Record:
    origin = f"{line.path}:{line.number}"
    try:
        return _record(origin, json.loads(text.decode("utf-8-sig")), line)
    except (ValueError, RecursionError) as error:
        return Record(origin, {}, "not UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON", line)


def _record(origin: str, value: Any, line: Line | None = None) -> Record:
    return Record(origin, value, "", line) if isinstance(value, dict) else Record(origin, {}, "not a JSON object", line)


def _read_file(path: Path) -> Iterator[Record]:
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix not in _SUFFIXES:
        raise UserError(f"the data {path} has an unknown ending: expected one of {', '.join(_SUFFIXES)}")
    with path.open("rb") as file:
        is_array = path.suffix == ".json" and file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    return _read_array(path) if is_array else read_lines(path)


def _read_array(path: Path) -> Iterator[Record]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON array ({error}): mend it, or write one JSON object a line") from error
    for number, value in enumerate(values, start=1):
        yield _record(f"{path}#{number}", value)


def _read_parquet(path: Path) -> Iterator[Record]:
    from pyarrow import ArrowException  # here, because most runs need neither it nor datasets, which take a second
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=1024)
            for number, fields in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
                yield Record(f"{path}#{number}", fields)
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # the latter: what no Python value can say
        raise UserError(f"{path} is no readable Parquet file ({error}): restore it, or leave it out") from error


def _read_dataset(name: str, subset: str | None, dataset_split: str, streaming: bool) -> Iterator[Record]:
    from datasets import load_dataset

    try:
        records = load_dataset(name, subset, split=dataset_split, streaming=streaming)
    except Exception as error:  # no such name, split or subset, no network, no room: datasets raises what it likes
        said = f"the data set {name} ({subset or 'default'}, {dataset_split}) cannot be loaded ({reason(error)})"
        raise UserError(f"{said}: expected a local file or folder, or a data set within reach") from error
    for number, fields in enumerate(records, start=1):
        yield Record(f"{name}/{dataset_split}#{number}", fields)


class RecordIndex:
    """Where records stand, and a digest of each: some 40 bytes a record, whatever its size."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._paths: list[Path] = []
        self._copies = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the index does)
        weakref.finalize(self, self._copies.close)

    def add(self, record: Record, split: str, digest: bytes) -> None:
        """Note where the record stands; ``digest`` (16 bytes) is of its content."""
        if record.line is None:
            file, number, offset = _COPIED, 0, self._copies.tell()
            pickle.dump(record, self._copies)
        else:
            path, number, offset = record.line
            if not self._paths or self._paths[-1] != path:  # file after file
                self._paths.append(path)
            file = len(self._paths) - 1
        self._rows += _ROW.pack(digest, SPLITS.index(split), file, number, offset)

    def read(self, place: int) -> Record:
        """The record that was added as number ``place``."""
        _, _, file, number, offset = self._row(place)
        if file == _COPIED:
            self._copies.seek(offset)
            return pickle.load(self._copies)
        with self._paths[file].open("rb") as opened:
            opened.seek(offset)
            return _parse(Line(self._paths[file], number, offset), opened.readline())

    def digest(self, place: int) -> bytes:
        """Of the record's content when it was added."""
        return self._row(place)[0]

    def _row(self, place: int) -> Any:
        return _ROW.unpack_from(self._rows, place * _ROW.size)

    def shuffled(self, split: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """The places of a split's records in the order of their digests, and these ``[n, 16]``; equal ones once."""
        rows = np.frombuffer(self._rows, _COLUMNS)
        mine = np.flatnonzero(rows["split"] == SPLITS.index(split))
        digests = rows["digest"][mine]
        high, low = digests.view(">u8").astype(np.uint64).T
        order = np.lexsort((low, high))
        new = np.ones(len(order), dtype=bool)
        new[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
        return mine[order][new], digests[order][new]
