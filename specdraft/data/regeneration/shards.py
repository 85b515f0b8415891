"""Answered conversations on disk: a file per shard, whole or absent, with a journal beside it while it is made.

A shard is a run of consecutive conversations, and its name a hash of their content and place: the same
conversations are found again, whatever follows them. Every answer is in the journal before the next one is waited for,
so that a killed process loses at most what was being decoded. A lock, which the operating system releases when its
holder dies, keeps two processes from making the same shard."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from specdraft.data.regeneration.dialogue import Outcome
from specdraft.data.regeneration.request import Ids
from specdraft.data.sources.base import Conversation
from specdraft.errors import UserError
from specdraft.files import atomic_file
from specdraft.text import fingerprint


class Counts(NamedTuple):
    """Of some conversations: ``turns`` and ``tokens`` count the answers.
    ``left_out`` conversations had no room for any answer, ``shortened`` ones not for all of them, ``unfinished`` ones
    end at an answer that was cut, after which ``dropped`` turns were not asked for, ``refused`` ones are those that
    the chat template did not take, and ``rejected`` ones end at a question of the target's own that was not asked."""

    conversations: int
    turns: int
    tokens: int
    left_out: int
    shortened: int
    unfinished: int
    dropped: int
    refused: int
    rejected: int = 0

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Counts":
        """Count the outcomes."""
        answers = [answer for outcome in outcomes for answer in outcome.answers]
        return cls(
            conversations=len(outcomes),
            turns=len(answers),
            tokens=sum(map(len, answers)),
            left_out=sum(not (one.examples or one.refused or one.rejected) for one in outcomes),
            shortened=sum(outcome.shortened for outcome in outcomes),
            unfinished=sum(outcome.unfinished for outcome in outcomes),
            dropped=sum(outcome.dropped for outcome in outcomes),
            refused=sum(bool(outcome.refused) for outcome in outcomes),
            rejected=sum(bool(outcome.rejected) for outcome in outcomes),
        )


class Header(NamedTuple):
    """The first line of a shard; ``checksum`` is of all other lines."""

    engine: str
    counts: Counts
    checksum: str

    def as_json(self) -> dict[str, str | int]:
        """As it is written."""
        return {"engine": self.engine, **self.counts._asdict(), "checksum": self.checksum}


class Shard:
    """The files of one shard in ``folder``: itself at ``path``, and its ``journal`` and ``lock`` until it is there."""

    def __init__(self, folder: Path, first: int, conversations: Sequence[Conversation]) -> None:
        """``first`` is the place of the first conversation among all."""
        # Their content, never where they stand: a file that was moved is not answered again.
        content = [[c.prompt_messages, c.tools, None if c.prompt_messages else c.response] for c in conversations]
        self.name = fingerprint([first, content], 24)
        self.path = folder / f"{self.name}.jsonl"
        self.journal, self.lock = self.path.with_suffix(".partial.jsonl"), self.path.with_suffix(".lock")

    def header(self) -> Header | None:
        """None if the shard is not there yet. Raises UserError if it is damaged."""
        if not self.path.exists():
            return None
        self._tidy()
        return self._read()[0]

    def outcomes(self) -> Iterator[Outcome]:
        """What became of the conversations, in order. Raises UserError if the shard is damaged."""
        for line in self._read()[1].splitlines():
            known = json.loads(line)
            examples = [(ids, [(start, end) for start, end in spans]) for ids, spans in known.pop("examples")]
            yield Outcome(examples=examples, **known)

    def write(self, engine: str, outcomes: Sequence[Outcome]) -> Header:
        """Put the finished shard in its place; the journal goes."""
        body = "".join(json.dumps(asdict(outcome), separators=(",", ":")) + "\n" for outcome in outcomes).encode()
        header = Header(engine, Counts.of(outcomes), fingerprint(body, 64))
        for abandoned in self.path.parent.glob(f".{self.path.name}.*.tmp"):  # of a process that was killed here
            abandoned.unlink()
        with atomic_file(self.path) as temporary:
            temporary.write_bytes(json.dumps(header.as_json()).encode() + b"\n" + body)
        self._tidy()
        return header

    def _tidy(self) -> None:
        self.journal.unlink(missing_ok=True)
        self.lock.unlink(missing_ok=True)

    def _read(self) -> tuple[Header, bytes]:
        first, _, body = self.path.read_bytes().partition(b"\n")
        try:
            known = json.loads(first)
            header = Header(
                known["engine"],
                Counts(**{name: known[name] for name in Counts._fields if name in known}),
                known["checksum"],
            )
            if header.checksum != fingerprint(body, 64):
                raise ValueError("another checksum")
        except (ValueError, KeyError, TypeError):
            said = f"the cached responses {self.path} are damaged"
            raise UserError(f"{said}: delete that file to have them generated again") from None
        return header, body


class Journal:
    """Answers by turn and by place in the shard, a line each. A last line cut off by a crash is removed.
    To be opened under the shard's lock."""

    def __init__(self, path: Path) -> None:
        self._known: dict[tuple[int, int], Ids] = {}
        whole = 0  # bytes
        self._file = path.open("a+b")
        self._file.seek(0)
        for line in self._file:
            try:
                turn, place, ids = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            self._known[turn, place] = ids
            whole += len(line)
        self._file.truncate(whole)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def known(self, turn: int) -> dict[int, Ids]:
        """Answers of one turn, by place in the shard."""
        return {place: ids for (at, place), ids in self._known.items() if at == turn}

    def write(self, turn: int, place: int, ids: Ids) -> None:
        """Note an answer; it outlives this process from here on."""
        self._file.write(json.dumps([turn, place, ids], separators=(",", ":")).encode() + b"\n")
        self._file.flush()
