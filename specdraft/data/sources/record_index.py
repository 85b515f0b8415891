"""Where conversations stand, so that each can be read again when it is asked for.

A line of JSON is found again by the byte it begins at. Rows of anything else are copied into a temporary file first
($TMPDIR says where): reading a Parquet file or a data set from afar in another order than its own takes far longer.
"""

import pickle
import tempfile
import weakref
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specdraft.data.sources.records import Line, Raw, read_line
from specdraft.data.sources.stdlib import SPLITS

_COPIED = -1


class RecordIndex:
    """Some 40 bytes for each conversation, whatever its size."""

    def __init__(self) -> None:
        """None yet."""
        self._digests = bytearray()  # 16 each
        self._splits = array("b")
        self._files = array("i")  # which of the paths, or _COPIED
        self._paths: list[Path] = []
        self._numbers = array("q")  # of lines
        self._offsets = array("q")
        self._copies = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the places do)
        weakref.finalize(self, self._copies.close)

    def add(self, raw: Raw, split: str, digest: bytes) -> None:
        """Note the row's place; ``digest`` (16 bytes) is of what it says."""
        self._digests += digest
        self._splits.append(SPLITS.index(split))
        if raw.line is None:
            self._files.append(_COPIED)
            self._numbers.append(0)
            self._offsets.append(self._copies.tell())
            pickle.dump(raw, self._copies)
        else:
            if not self._paths or self._paths[-1] != raw.line.path:  # file after file
                self._paths.append(raw.line.path)
            self._files.append(len(self._paths) - 1)
            self._numbers.append(raw.line.number)
            self._offsets.append(raw.line.offset)

    def read(self, place: int) -> Raw:
        """The row again."""
        if self._files[place] == _COPIED:
            self._copies.seek(self._offsets[place])
            return pickle.load(self._copies)
        return read_line(Line(self._paths[self._files[place]], self._numbers[place], self._offsets[place]))

    def digest(self, place: int) -> bytes:
        """Of what the row said when it was added."""
        return bytes(self._digests[16 * place : 16 * (place + 1)])

    def fair_order(self, split: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """RecordIndex of a split by digest, and their digests ``[n, 16]``; of equal ones the first is taken."""
        mine = np.flatnonzero(np.frombuffer(self._splits, dtype=np.int8) == SPLITS.index(split))
        digests = np.frombuffer(bytes(self._digests), dtype=np.uint8).reshape(-1, 16)[mine]
        high, low = digests.view(">u8").astype(np.uint64).T
        order = np.lexsort((low, high))
        new = np.ones(len(order), dtype=bool)
        new[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
        return mine[order][new], digests[order][new]
