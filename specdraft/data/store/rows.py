"""The packed rows of a store: one tensor ``rows [R, 3, T]`` int32, as ``HeldRows`` have it, in a safetensors file.

R = rows, T = tokens in a row. Written and read a few rows at a time, so that memory does not grow with them.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.data.packing import HeldRows, Rows
from specdraft.errors import UserError
from specdraft.targets.batch import Batch
from specdraft.tensors import read_tensors


class Survey(NamedTuple):
    """What a pass over rows tells. file: the name of their file; asked: positions whose last hidden state is stored."""

    file: str
    asked: int


def survey(split: str, rows: Rows, every_last: bool) -> Survey:
    """What a store of these rows will hold; nothing is written."""
    digest, count = hashlib.sha256(_header(rows)), 0
    for batch in rows.blocks():
        digest.update(_bytes(batch))
        count += int(asked(batch, every_last).sum())
    return Survey(f"{split}-rows-{digest.hexdigest()[:16]}.safetensors", count)


def row_bytes(rows: Rows) -> Iterator[bytes]:
    """The bytes of the file, piece by piece."""
    yield _header(rows)
    for batch in rows.blocks():
        yield _bytes(batch)


def read_rows(file: Path, count: int, row_length: int) -> HeldRows:
    """The rows of a file, which stay on disk until they are taken. Raises UserError unless they are ``[R, T]`` rows."""
    tensors = read_tensors(file)
    tensor = tensors.get("rows")
    if len(tensors) != 1 or tensor is None or tensor.shape != (count, 3, row_length) or tensor.dtype != torch.int32:
        raise UserError(f"{file} does not hold the rows that its store announces: expected it as written; restore it")
    return HeldRows(tensor)


def asked(batch: Batch, every_last: bool) -> Tensor:
    """Which positions' last hidden states are stored, ``[B, T]`` bool: all, or those before a token to be learnt of the
    same document, which is where targets teach and heads read."""
    if every_last:
        return torch.ones_like(batch.loss_mask)
    documents = batch.document_ids
    follows = batch.loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    return torch.nn.functional.pad(follows, (0, 1))


def _header(rows: Rows) -> bytes:
    """That of a safetensors file: its length in 8 bytes, little-endian, and JSON, padded to whole words."""
    shape = [len(rows), 3, rows.row_length]
    size = 4 * shape[0] * shape[1] * shape[2]
    text = json.dumps({"rows": {"dtype": "I32", "shape": shape, "data_offsets": [0, size]}}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(batch: Batch) -> bytes:
    return HeldRows.of(batch).tensor.numpy().astype("<i4", copy=False).tobytes()
