"""Tokenized examples on disk, flat and memory-mapped: memory holds their lengths alone.

N = tokens of all examples, E = examples, V = target vocabulary. A directory, written once and under a name that is a
hash of all that decides the examples:

    tokens.bin    int32 [N], example after example; a token t to be learned is kept as ~t, which is negative
    lengths.npy   int32 [2, E], the tokens of each example and how many of them are to be learned
    counts.npy    int64 [V], how often each id is to be learned
    index.json    fingerprints of the other files, what was counted on the way, and what was warned of"""

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
from specdraft.text import file_fingerprint, fingerprint

_VERSION = 2
_TOKENS, _LENGTHS, _COUNTS, _INDEX = "tokens.bin", "lengths.npy", "counts.npy", "index.json"
Ints = npt.NDArray[np.int32]


class Flat(NamedTuple):
    """Some examples, one after the other: ``tokens`` as in the file; of each its length and its tokens to learn."""

    tokens: Ints  # [N]
    lengths: Ints  # [E]
    supervised: Ints  # [E]


@dataclass
class Notes:
    """What is counted and warned of while examples are made: complete when the last one is."""

    counts: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Examples:
    """All examples of a split. ``counts [V]`` of ids to be learned; ``fingerprint`` is that of tokens and lengths."""

    flat: Flat  # its tokens memory-mapped
    counts: Tensor
    notes: Notes
    fingerprint: str


def flatten(examples: Sequence[Example]) -> Flat:
    """Lists to arrays."""
    lengths = np.array([len(example.input_ids) for example in examples], dtype=np.int32)
    ids = np.fromiter(chain.from_iterable(example.input_ids for example in examples), np.int32)
    mask = np.fromiter(chain.from_iterable(example.loss_mask for example in examples), bool)
    supervised = np.array([sum(example.loss_mask) for example in examples], dtype=np.int32)
    return Flat(np.where(mask, ~ids, ids), lengths, supervised)


def in_chunks(examples: Iterable[Example], size: int = 256) -> Iterator[Flat]:
    """The examples as flat chunks of ``size``."""
    rest = iter(examples)
    return map(flatten, iter(lambda: list(islice(rest, size)), []))


def cached_examples(
    folder: Path, key_fields: Any, vocab_size: int, make: Callable[[Notes], Iterator[Flat]]
) -> Examples:
    """The examples that ``make`` gives, from ``folder`` if they are there: ``key_fields`` (JSON-able) decide them.
    Of several processes one makes them and the others wait. Damaged files are made again. Raises UserError for ids
    beyond the vocabulary, or if they cannot be written."""
    key = fingerprint([_VERSION, vocab_size, key_fields], 24)
    with exclusive(folder / f"{key}.lock"):
        found = _read(folder / key)
        if found is None:
            for left in folder.glob(f".{key}.*.tmp"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with atomic_directory(folder / key) as temporary:
                _write(temporary, vocab_size, make)
            found = _read(folder / key)
            assert found is not None
    for warning in found.notes.warnings:
        warn(warning)
    return found


def _write(folder: Path, vocab_size: int, make: Callable[[Notes], Iterator[Flat]]) -> None:
    notes, lengths = Notes(), [np.empty((2, 0), np.int32)]
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    try:
        with (folder / _TOKENS).open("wb") as file:
            for flat in make(notes):
                file.write(flat.tokens.astype("<i4").tobytes())
                lengths.append(np.stack([flat.lengths, flat.supervised]))
                counts += count(torch.from_numpy(~flat.tokens[flat.tokens < 0]), vocab_size)
            file.flush()
            os.fsync(file.fileno())
        np.save(folder / _LENGTHS, np.concatenate(lengths, axis=1))
        np.save(folder / _COUNTS, counts.numpy())
        files = {name: file_fingerprint(folder / name) for name in (_TOKENS, _LENGTHS, _COUNTS)}
        index = {"files": files, "counts": notes.counts, "warnings": notes.warnings}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        if error.filename is not None:  # a file of the source, or one that cannot be opened
            raise
        said = f"cannot write the prepared examples to {folder.parent} ({error.strerror})"
        raise UserError(f"{said}: make room, 4 bytes a token, or choose another data.cache_dir") from error


def _read(folder: Path) -> Examples | None:
    """What is at ``folder``, None if there is nothing, or something damaged."""
    if not folder.exists():
        return None
    tokens = folder / _TOKENS
    damaged = folder / _INDEX
    try:
        index = read_json(damaged)
        notes = Notes(index["counts"], index["warnings"])
        for name, expected in index["files"].items():
            damaged = folder / name
            if file_fingerprint(damaged) != expected:
                raise ValueError
    except (UserError, OSError, KeyError, TypeError, AttributeError, ValueError):
        warn(f"the prepared examples {damaged} are damaged and are made again")
        return None
    mapped = np.memmap(tokens, "<i4", "r") if tokens.stat().st_size else np.empty(0, np.int32)
    flat = Flat(mapped, *np.load(folder / _LENGTHS))
    counts = torch.from_numpy(np.load(folder / _COUNTS))
    return Examples(flat, counts, notes, fingerprint([index["files"][name] for name in (_TOKENS, _LENGTHS)]))
