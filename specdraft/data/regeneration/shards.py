"""Answered conversations on disk: a file per shard, whole or absent, with a journal beside it while it is made.

A shard is a run of consecutive conversations, and its name a hash of what they say and where they stand: who asks for
the same conversations again finds it, whatever comes behind them. Every answer is in the journal before the next one is
waited for, so that a killed process loses at most what was being decoded. A lock, which the operating system opens when
its holder dies, keeps two processes from making the same shard.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from specdraft.data.regeneration.dialogue import Record
from specdraft.data.regeneration.request import Ids
from specdraft.data.sources.base import Conversation
from specdraft.errors import UserError
from specdraft.files import atomic_file, exclusive


@dataclass(frozen=True)
class Header:
    """The first line of a shard. ``turns`` and ``tokens`` count the answers; ``checksum`` is of all other lines.

    ``left_out`` conversations had no room for any answer, ``shortened`` ones not for all of them, ``unfinished`` ones
    end at an answer that was cut, after which ``dropped`` turns were not asked for, and ``refused`` ones are those that
    the chat template did not take.
    """

    engine: str
    conversations: int
    turns: int
    tokens: int
    left_out: int
    shortened: int
    unfinished: int
    dropped: int
    refused: int
    checksum: str


class Shard:
    """The files of one shard in ``folder``."""

    def __init__(self, folder: Path, first: int, conversations: Sequence[Conversation]) -> None:
        """``first`` is the place of the first conversation among all."""
        # What they say, never where they stand: a file that was moved is not answered again.
        said = [[c.prompt_messages, c.tools, None if c.prompt_messages else c.response] for c in conversations]
        decisive = json.dumps([first, said], sort_keys=True, default=str)
        self.name = hashlib.sha256(decisive.encode()).hexdigest()[:24]
        self.path = folder / f"{self.name}.jsonl"

    def header(self) -> Header | None:
        """None if the shard is not there yet. Raises UserError if it is damaged."""
        if not self.path.exists():
            return None
        self._tidy()
        return self._read()[0]

    def records(self) -> Iterator[Record]:
        """The conversations' records, in order. Raises UserError if the shard is damaged."""
        for line in self._read()[1].splitlines():
            record = Record(**json.loads(line))
            yield record._replace(examples=[(ids, [(a, b) for a, b in spans]) for ids, spans in record.examples])

    def write(self, engine: str, records: Sequence[Record]) -> Header:
        """Put the finished shard in its place; the journal goes."""
        body = "".join(json.dumps(record._asdict(), separators=(",", ":")) + "\n" for record in records).encode()
        answers = [answer for record in records for answer in record.answers]
        header = Header(
            engine=engine,
            conversations=len(records),
            turns=len(answers),
            tokens=sum(map(len, answers)),
            left_out=sum(not (record.examples or record.refused) for record in records),
            shortened=sum(record.shortened for record in records),
            unfinished=sum(record.unfinished for record in records),
            dropped=sum(record.dropped for record in records),
            refused=sum(bool(record.refused) for record in records),
            checksum=_checksum(body),
        )
        for abandoned in self.path.parent.glob(f".{self.path.name}.*.tmp"):  # of a process that was killed here
            abandoned.unlink()
        with atomic_file(self.path) as temporary:
            temporary.write_bytes(json.dumps(asdict(header)).encode() + b"\n" + body)
        self._tidy()
        return header

    def exclusive(self, wait: bool) -> AbstractContextManager[bool]:
        """Hold the shard's lock; False if another process holds it and we do not ``wait``."""
        return exclusive(self._lock, wait)

    @contextmanager
    def journal(self) -> Iterator["Journal"]:
        """The answers so far, and a place for more. To be opened under the lock."""
        journal = Journal(self._journal)
        try:
            yield journal
        finally:
            journal.close()

    @property
    def _journal(self) -> Path:
        return self.path.with_suffix(".partial.jsonl")

    @property
    def _lock(self) -> Path:
        return self.path.with_suffix(".lock")

    def _tidy(self) -> None:
        """Whoever comes when the shard is there needs no journal, and no lock to find that nothing is left to do."""
        self._journal.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)

    def _read(self) -> tuple[Header, bytes]:
        first, _, body = self.path.read_bytes().partition(b"\n")
        header: Header | None = None
        try:
            known = json.loads(first)
            header = Header(**{field.name: known[field.name] for field in fields(Header)})
        except (ValueError, KeyError, TypeError):
            pass  # no header is damage as well
        if header is None or header.checksum != _checksum(body):
            raise UserError(
                f"the cached responses {self.path} are damaged: delete that file to have them generated anew"
            )
        return header, body


class Journal:
    """Answers by turn and by place in the shard, a line each. A last line cut short by a crash is taken off."""

    def __init__(self, path: Path) -> None:
        self._known: dict[tuple[int, int], Ids] = {}
        whole = self._replay(path) if path.exists() else 0
        self._file = path.open("ab")
        os.truncate(path, whole)

    def known(self, turn: int) -> dict[int, Ids]:
        """Answers of one turn, by place in the shard."""
        return {place: ids for (at, place), ids in self._known.items() if at == turn}

    def write(self, turn: int, place: int, ids: Ids) -> None:
        """Note an answer; it outlives this process from here on."""
        self._file.write(json.dumps([turn, place, ids], separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _replay(self, path: Path) -> int:
        """Read what is there; returns the length of the whole lines."""
        whole = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    turn, place, ids = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n"):
                    break
                self._known[turn, place] = ids
                whole += len(line)
        return whole


def _checksum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
