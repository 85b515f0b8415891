"""Packing: examples side by side in sequences of one length, so that little is computed on padding.

R = packed sequences, T = tokens in a sequence, S = segments, E = examples, N = tokens of all examples.

Best-fit decreasing: examples from long to short, each into the fullest sequence that still takes it. An example longer
than a sequence becomes several pieces, each a document of its own, so that every token to learn is learned once, most
of them with their context. A sequence is a list of segments of the flat, memory-mapped tokens of
``tokenization/cache.py``, and its tensors are made when it is asked for."""

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specdraft.data.tokenization.cache import Flat, Ints, flatten
from specdraft.data.tokenization.chat import Example
from specdraft.errors import UserError
from specdraft.targets.batch import Batch

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackingReport:
    """What packing made of the examples. ``split`` ones were longer than T; ``documents`` counts their pieces;
    ``unsupervised`` ones had no token to learn and were left out."""

    sequences: int
    documents: int
    tokens: int
    supervised_tokens: int
    padding_share: float
    split: int
    unsupervised: int


class Segments(NamedTuple):
    """Stretches of the flat tokens, each a document; the first ``context`` tokens of one are learned elsewhere."""

    begins: Longs  # [S]
    lengths: Ints  # [S]
    context: Ints  # [S]


class PackedData(Dataset[Batch], ABC):
    """Packed sequences ``[R, T]``, taken several at a time; indices from R on give padding."""

    sequence_length: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The sequences at ``indices``, as a batch: loaders ask for a whole batch at once."""

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def blocks(self) -> Iterator[Batch]:
        """All sequences in their order, as many at a time as hold some 2**18 tokens."""
        size = max(1, 2**18 // self.sequence_length)
        for first in range(0, len(self), size):
            yield self.__getitems__(range(first, min(len(self), first + size)))

    def whole(self) -> Batch:
        """All sequences as one batch, in memory: 25 bytes a token."""
        return self.__getitems__(range(len(self)))


class PackedSegments(PackedData):
    """Sequences that are made of their segments when they are asked for."""

    def __init__(self, tokens: Ints, segments: Segments, bounds: Longs, sequence_length: int) -> None:
        """``segments`` are in the order of the sequences; those of r are ``bounds[r]`` to ``bounds[r + 1]``."""
        self.tokens, self.segments, self.bounds, self.sequence_length = tokens, segments, bounds, sequence_length

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        batch = padding(len(indices), self.sequence_length)
        for row, index in enumerate(indices):
            start = 0
            segments = range(*self.bounds[index : index + 2].tolist()) if index < len(self) else range(0)
            for document, segment in enumerate(segments):
                begin, length, context = (int(values[segment]) for values in self.segments)
                tokens = np.asarray(self.tokens[begin : begin + length])
                learned = tokens < 0
                batch.input_ids[row, start : start + length] = torch.from_numpy(np.where(learned, ~tokens, tokens))
                batch.position_ids[row, start : start + length] = torch.arange(length)
                batch.document_ids[row, start : start + length] = document
                batch.loss_mask[row, start + context : start + length] = torch.from_numpy(learned[context:])
                start += length
            batch.position_ids[row, start:] = torch.arange(self.sequence_length - start)
        return batch

    def digest(self) -> bytes:
        """SHA-256 of the places of all tokens."""
        places = hashlib.sha256(str(self.sequence_length).encode())
        for values in (*self.segments, self.bounds):
            places.update(values.tobytes())
        return places.digest()

    def __getstate__(self) -> dict[str, Any]:
        """A worker maps the file itself: pickled, a memory map would be a copy."""
        if not isinstance(self.tokens, np.memmap) or self.tokens.filename is None:
            return self.__dict__
        return self.__dict__ | {"tokens": Path(self.tokens.filename)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if isinstance(state["tokens"], Path):
            self.tokens = np.memmap(state["tokens"], "<i4", "r")


class PackedTensor(PackedData):
    """Sequences that are one tensor ``[R, 3, T]`` int32, in memory or mapped from a file.
    For every token its id, or ``~id`` if it is to be learned; its position; its document."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.sequence_length = tensor, tensor.shape[2]

    @classmethod
    def of(cls, batch: Batch) -> "PackedTensor":
        """The sequences of a batch."""
        ids = torch.where(batch.loss_mask, ~batch.input_ids, batch.input_ids)
        return cls(torch.stack([ids, batch.position_ids, batch.document_ids], dim=1).int())

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        found, chosen = padding(len(indices), self.sequence_length), torch.tensor(indices, dtype=torch.int64)
        there = chosen < len(self)
        ids, positions, documents = self.tensor[chosen[there]].long().unbind(1)
        values = (torch.where(ids < 0, ~ids, ids), positions, documents, ids < 0)
        for name, value in zip(vars(found), values, strict=True):
            getattr(found, name)[there] = value
        return found


def pack(examples: Sequence[Example], sequence_length: int) -> tuple[Batch, PackingReport]:
    """All sequences of examples in memory as one batch ``[R, T]``, and the report. Raises UserError."""
    data, report = pack_flat(flatten(examples), sequence_length)
    return data.whole(), report


def pack_flat(flat: Flat, sequence_length: int) -> tuple[PackedSegments, PackingReport]:
    """Sequences of T = ``sequence_length``, and the report. Deterministic. Raises UserError if nothing is to learn."""
    if sequence_length < 2:
        raise UserError(f"data.sequence_length is {sequence_length}: expected at least 2 tokens")
    kept = flat.supervised > 0
    if not kept.any():
        raise UserError(f"none of the {len(kept)} examples has a token to learn: expected responses; choose other data")
    long = kept & (flat.lengths > sequence_length)
    segments = _segments(flat, kept & ~long, long, sequence_length)
    order, bounds = _assign(segments.lengths, sequence_length)
    tokens = int(segments.lengths.sum(dtype=np.int64))
    report = PackingReport(
        sequences=len(bounds) - 1,
        documents=len(order),
        tokens=tokens,
        supervised_tokens=int(flat.supervised.sum(dtype=np.int64)),
        padding_share=1 - tokens / ((len(bounds) - 1) * sequence_length),
        split=int(long.sum()),
        unsupervised=int((~kept).sum()),
    )
    chosen = Segments(segments.begins[order], segments.lengths[order], segments.context[order])
    return PackedSegments(flat.tokens, chosen, bounds, sequence_length), report


def openings(data: PackedData) -> list[list[int]]:
    """Token ids of each document up to its first token to learn, in an order that their content decides."""
    found = []
    for batch in data.blocks():
        for ids, documents, learned in zip(batch.input_ids, batch.document_ids, batch.loss_mask, strict=True):
            for document in range(int(documents.max()) + 1):
                here = documents == document
                found.append(ids[here][: int(learned[here].long().argmax())].tolist())
    return sorted(filter(None, found), key=lambda ids: hashlib.sha256(str(ids).encode()).digest())


def padding(count: int, sequence_length: int) -> Batch:
    """``count`` sequences of padding alone: id 0, document -1, nothing supervised."""
    ids, positions = torch.zeros((count, sequence_length), dtype=torch.int64), torch.arange(sequence_length)
    return Batch(ids, positions.repeat(count, 1), torch.full_like(ids, -1), torch.zeros_like(ids, dtype=torch.bool))


def _segments(flat: Flat, short: npt.NDArray[np.bool_], long: npt.NDArray[np.bool_], length: int) -> Segments:
    begins = np.cumsum(flat.lengths, dtype=np.int64) - flat.lengths
    numbers = np.flatnonzero(long)
    pieces = [
        (example, begins[example] + start, size, context)
        for example, tokens in zip(numbers, _read(flat.tokens, begins[numbers], flat.lengths[numbers]), strict=True)
        for start, size, context in _pieces(tokens < 0, length)
    ]
    examples, *parts = np.array(pieces, np.int64).reshape(-1, 4).T
    whole = np.flatnonzero(short)
    order = np.argsort(np.concatenate([whole, examples]), kind="stable")
    wholes = (begins[whole], flat.lengths[whole], np.zeros(len(whole), np.int32))
    joined = (np.concatenate([one, part.astype(one.dtype)])[order] for one, part in zip(wholes, parts, strict=True))
    return Segments(*joined)


def _read(tokens: Ints, begins: Longs, lengths: Ints) -> Iterator[Ints]:
    """Stretches of the tokens; of a mapped file they are read, as pages of the map would stay in memory."""
    file = tokens.filename if isinstance(tokens, np.memmap) else None
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        offset = begin * tokens.itemsize
        yield np.fromfile(file, "<i4", length, offset=offset) if file else tokens[begin : begin + length]


def _pieces(mask: npt.NDArray[np.bool_], length: int) -> Iterator[tuple[int, int, int]]:
    """(start, size, context) of pieces of at most ``length`` tokens that supervise each token of the mask once.
    A piece begins where the example does, or a quarter of ``length`` before its first token to learn, as context."""
    learned = np.flatnonzero(mask)
    context, done = length // 4, 0
    while (place := np.searchsorted(learned, done)) < len(learned):
        first = int(learned[place])
        start = 0 if first < length - context else first - context
        done = min(start + length, len(mask))
        yield start, done - start, first - start


def _assign(lengths: Ints, capacity: int) -> tuple[Longs, Longs]:
    """Segments in the order of their sequences ``[S]``, and their bounds ``[R + 1]``; by best-fit decreasing."""
    longest_first = np.argsort(-lengths, kind="stable")
    sequence_of = np.empty(len(lengths), dtype=np.int64)
    count = 0
    room = defaultdict[int, list[int]](list)  # sequences by their free tokens; of equal ones the first is taken
    sizes: list[int] = []  # of which ``room`` holds sequences, ascending: at most ``capacity``
    for place, length in enumerate(lengths[longest_first].tolist()):
        found = bisect_left(sizes, length)
        if found < len(sizes):
            free = sizes[found]
            sequence = heappop(room[free])
            if not room[free]:
                del sizes[found]
        else:
            free, sequence, count = capacity, count, count + 1
        sequence_of[place] = sequence
        if left := free - length:
            if not room[left]:
                insort(sizes, left)
            heappush(room[left], sequence)
    order = np.argsort(sequence_of, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(sequence_of, minlength=count))])
    return longest_first[order], bounds
