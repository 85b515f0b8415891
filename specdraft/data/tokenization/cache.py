"""Tokenized examples on disk, flat and memory-mapped: memory holds their lengths alone.

N = tokens of all examples, E = examples, V = target vocabulary. A directory, written once and under a name that is a
hash of all that decides the examples:

    tokens.bin    int32 [N], example after example; a token t to be learned is kept as ~t, which is negative
    lengths.npy   int32 [2, E], the tokens of each example and how many of them are to be learned
    counts.npy    int64 [V], how often each id is to be learned
    index.json    checksums of the other files, what was counted on the way, and what was warned of
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdraft.data.tokenization.chat import Example
from specdraft.data.tokenization.draft_vocabulary import count
from specdraft.errors import UserError, warn
from specdraft.files import atomic_directory, exclusive, read_json

_VERSION = 1
_TOKENS, _LENGTHS, _COUNTS, _INDEX = "tokens.bin", "lengths.npy", "counts.npy", "index.json"
Ints = npt.NDArray[np.int32]


class Flat(NamedTuple):
    """Some examples, one after the other: ``tokens`` as in the file, ``lengths`` of each."""

    tokens: Ints
    lengths: Ints


@dataclass
class Notes:
    """What is counted and warned of while examples are made: complete when the last one is."""

    counts: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Examples:
    """All examples of a split. ``counts [V]`` of ids to be learned; ``checksum`` is that of tokens and lengths."""

    tokens: Ints  # [N], memory-mapped
    lengths: Ints  # [E]
    supervised: Ints  # [E]
    counts: Tensor
    notes: Notes
    checksum: str


def flatten(examples: Sequence[Example]) -> Flat:
    """Lists to arrays."""
    lengths = np.array([len(example.input_ids) for example in examples], dtype=np.int32)
    ids = np.fromiter(chain.from_iterable(example.input_ids for example in examples), np.int32)
    mask = np.fromiter(chain.from_iterable(example.loss_mask for example in examples), bool)
    return Flat(np.where(mask, ~ids, ids), lengths)


def in_chunks(examples: Iterable[Example], size: int = 256) -> Iterator[Flat]:
    """The examples as flat chunks of ``size``."""
    rest = iter(examples)
    return map(flatten, iter(lambda: list(islice(rest, size)), []))


def supervised(flat: Flat) -> Ints:
    """How many tokens of each example are to be learned."""
    before = np.concatenate([[0], np.cumsum(flat.tokens < 0)])
    ends = np.cumsum(flat.lengths, dtype=np.int64)
    return (before[ends] - before[ends - flat.lengths]).astype(np.int32)


def prepared(folder: Path, decisive: Any, vocab_size: int, make: Callable[[Notes], Iterator[Flat]]) -> Examples:
    """The examples that ``make`` gives, from ``folder`` if they are there: ``decisive`` (JSON-able) decides them.

    Of several processes one makes them and the others wait. Damaged files are made anew. Raises UserError for ids that
    the vocabulary has not, or if they cannot be written.
    """
    key = hashlib.sha256(json.dumps([_VERSION, vocab_size, decisive], sort_keys=True).encode()).hexdigest()[:24]
    place = folder / key
    with exclusive(folder / f"{key}.lock"):
        found = _read(place)
        if found is None:
            for left in folder.glob(f".{key}.*.tmp"):  # left behind by a kill
                shutil.rmtree(left, ignore_errors=True)
            with atomic_directory(place) as temporary:
                _write(temporary, vocab_size, make)
            found = _read(place)
            assert found is not None
    for warning in found.notes.warnings:
        warn(warning)
    return found


def _write(folder: Path, vocab_size: int, make: Callable[[Notes], Iterator[Flat]]) -> None:
    notes = Notes()
    lengths, learned = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    chunks = make(notes)
    try:
        with (folder / _TOKENS).open("wb") as file:
            for flat in chunks:
                file.write(flat.tokens.astype("<i4").tobytes())
                lengths.append(flat.lengths)
                learned.append(supervised(flat))
                counts += count(torch.from_numpy(~flat.tokens[flat.tokens < 0]), vocab_size)
            file.flush()
            os.fsync(file.fileno())
        np.save(folder / _LENGTHS, np.stack([np.concatenate(lengths), np.concatenate(learned)]))
        np.save(folder / _COUNTS, counts.numpy())
        files = {name: _checksum(folder / name) for name in (_TOKENS, _LENGTHS, _COUNTS)}
        index = {"files": files, "counts": notes.counts, "warnings": notes.warnings}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        if error.filename is not None:  # a file of the source, or one that cannot be opened
            raise
        raise UserError(
            f"cannot write the prepared examples to {folder.parent} ({error.strerror}): make room, 4 bytes a token, or "
            "choose another data.cache_dir"
        ) from error


def _read(folder: Path) -> Examples | None:
    """What is at ``folder``, None if there is nothing, or nothing whole."""
    if not folder.exists():
        return None
    damaged = folder / _INDEX
    try:
        index = read_json(damaged)
        notes = Notes(index["counts"], index["warnings"])
        for name, checksum in index["files"].items():
            damaged = folder / name
            if _checksum(damaged) != checksum:
                raise ValueError
    except (UserError, OSError, KeyError, TypeError, AttributeError, ValueError):
        warn(f"the prepared examples {damaged} are damaged and are made anew")
        return None
    lengths, learned = np.load(folder / _LENGTHS)
    tokens = folder / _TOKENS
    mapped = np.memmap(tokens, "<i4", "r") if tokens.stat().st_size else np.empty(0, np.int32)
    checksum = "/".join(index["files"][name] for name in (_TOKENS, _LENGTHS))
    return Examples(mapped, lengths, learned, torch.from_numpy(np.load(folder / _COUNTS)), notes, checksum)


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]
