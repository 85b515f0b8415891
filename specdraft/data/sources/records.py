"""Rows of local files and of data sets by name, one after the other and each with the place where it stands."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from datasets import load_dataset
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from specdraft.errors import UserError

_SUFFIXES = (".jsonl", ".json", ".parquet")


class Line(NamedTuple):
    """The line ``number`` of a file, which begins at byte ``offset``."""

    path: Path
    number: int
    offset: int


class Raw(NamedTuple):
    """A row as it stands at ``origin``; ``error`` says why there is none. ``line``: where to find it again at once."""

    origin: str
    row: dict[str, Any]
    error: str = ""
    line: Line | None = None


def read_rows(path: str, subset: str | None, dataset_split: str, streaming: bool) -> Iterator[Raw]:
    """Rows of a file, of all such files below a folder, or of a ``datasets`` name. Raises UserError.

    JSON Lines and Parquet are read piece by piece: memory does not grow with the file. The other three arguments are
    for names alone.
    """
    place = Path(path).expanduser()
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


def _read_file(path: Path) -> Iterator[Raw]:
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix not in _SUFFIXES:
        raise UserError(f"the data {path} has an unknown ending: expected one of {', '.join(_SUFFIXES)}")
    with path.open("rb") as file:
        is_array = path.suffix == ".json" and file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    return _read_array(path) if is_array else _read_lines(path)


def _read_lines(path: Path) -> Iterator[Raw]:
    offset = 0
    with path.open("rb") as file:  # lines by \n alone: JSON strings may hold U+2028 and its like unescaped
        for number, text in enumerate(file, start=1):
            if text.strip():
                yield _parse(Line(path, number, offset), text)
            offset += len(text)


def read_line(line: Line) -> Raw:
    """The row of a line that ``read_rows`` has given."""
    with line.path.open("rb") as file:
        file.seek(line.offset)
        return _parse(line, file.readline())


def _parse(line: Line, text: bytes) -> Raw:
    origin = f"{line.path}:{line.number}"
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Raw(origin, {}, "not UTF-8")
    except (ValueError, RecursionError):
        return Raw(origin, {}, "not JSON")
    return _checked(origin, value)._replace(line=line)


def _read_array(path: Path) -> Iterator[Raw]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON array ({error}): mend it, or write one JSON object a line") from error
    for number, value in enumerate(values, start=1):
        yield _checked(f"{path}#{number}", value)


def _checked(origin: str, value: Any) -> Raw:
    return Raw(origin, value) if isinstance(value, dict) else Raw(origin, {}, "not a JSON object")


def _read_parquet(path: Path) -> Iterator[Raw]:
    try:
        number = 0
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield Raw(f"{path}#{number}", row)
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # the latter: what no Python value can say
        raise UserError(f"{path} is no readable Parquet file ({error}): restore it, or leave it out") from error


def _read_dataset(name: str, subset: str | None, dataset_split: str, streaming: bool) -> Iterator[Raw]:
    try:
        rows = load_dataset(name, subset, split=dataset_split, streaming=streaming)
    except Exception as error:  # no such name, split or subset, no network, no room: datasets raises what it likes
        reason = " ".join(str(error).split())
        raise UserError(
            f"the data set {name} ({subset or 'default'}, {dataset_split}) cannot be loaded ({reason}): "
            "expected a local file or folder, or the name of a data set that this machine can reach"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield Raw(f"{name}/{dataset_split}#{number}", row)
