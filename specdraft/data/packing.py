"""Packing: examples side by side in rows of one length, so that little is computed on padding.

R = rows, T = tokens in a row.

Best-fit decreasing: examples from long to short, each into the fullest row that still takes it. An example that is
longer than a row becomes several pieces, each a document of its own, so that every token to learn is learned once, most
of them with what went before.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdraft.data.chat import Example
from specdraft.drafters.batch import Batch
from specdraft.errors import UserError


@dataclass(frozen=True)
class PackingReport:
    """What packing made of the examples. ``split`` examples were longer than a row; ``documents`` counts their pieces.

    ``unsupervised`` examples had no token to learn and were left out.
    """

    rows: int
    documents: int
    tokens: int
    supervised_tokens: int
    padding_share: float
    split: int
    unsupervised: int


def pack(examples: Sequence[Example], sequence_length: int, padding_id: int = 0) -> tuple[Batch, PackingReport]:
    """All rows as one batch ``[R, T]``, and the report. Deterministic. Raises UserError if nothing is left to learn."""
    if sequence_length < 2:
        raise UserError(f"data.sequence_length is {sequence_length}: expected at least 2 tokens")
    supervised = [e for e in examples if any(e.loss_mask)]
    if not supervised:
        raise UserError(
            f"none of the {len(examples)} examples has a token to learn: expected responses; choose other data"
        )
    kept = [piece for e in supervised for piece in _pieces(e, sequence_length)]
    rows = _assign([len(e.input_ids) for e in kept], sequence_length)
    tokens = sum(len(e.input_ids) for e in kept)
    report = PackingReport(
        rows=len(rows),
        documents=len(kept),
        tokens=tokens,
        supervised_tokens=sum(sum(e.loss_mask) for e in kept),
        padding_share=1 - tokens / (len(rows) * sequence_length),
        split=sum(len(e.input_ids) > sequence_length for e in supervised),
        unsupervised=len(examples) - len(supervised),
    )
    batch = padding_rows(len(rows), sequence_length, padding_id)
    for row, members in enumerate(rows):
        start = 0
        for document, index in enumerate(members):
            ids, mask = kept[index]
            place = slice(start, start + len(ids))
            batch.input_ids[row, place] = torch.tensor(ids)
            batch.position_ids[row, place] = torch.arange(len(ids))
            batch.document_ids[row, place] = document
            batch.loss_mask[row, place] = torch.tensor(mask)
            start += len(ids)
        batch.position_ids[row, start:] = torch.arange(sequence_length - start)
    return batch, report


def padding_rows(rows: int, sequence_length: int, padding_id: int = 0) -> Batch:
    """Rows ``[R, T]`` of padding alone: document -1, nothing supervised."""
    shape = (rows, sequence_length)
    return Batch(
        input_ids=torch.full(shape, padding_id),
        position_ids=torch.arange(sequence_length).repeat(rows, 1),
        document_ids=torch.full(shape, -1),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
    )


def _pieces(example: Example, length: int) -> list[Example]:
    """The example, or if it is longer, pieces of at most ``length`` tokens that supervise each of its tokens once.

    A piece begins where the example does, or a quarter of a row before its first token to learn: that is context alone.
    """
    ids, mask = example
    if len(ids) <= length:
        return [example]
    pieces: list[Example] = []
    context, done = length // 4, 0
    while True in mask[done:]:
        first = mask.index(True, done)
        start = 0 if first < length - context else first - context
        end = start + length
        pieces.append(Example(ids[start:end], [False] * (first - start) + mask[first:end]))
        done = end
    return pieces


def _assign(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows as lists of indices, by best-fit decreasing in O(n log n) comparisons."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[index], 0))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > lengths[index]:
            insort(room, (free - lengths[index], row))
    return rows
