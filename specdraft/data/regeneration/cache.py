"""Regeneration: conversations in, shards of answered ones on disk, read back one shard at a time.

Whatever is there already is not answered again. What decides the answers names the folder; the engine that gave them
does not, because all engines serve the same target: a manifest says which it was. Several processes that ask for the
same conversations share the shards among them, and leave when all are there.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from specdraft.data.regeneration.dialogue import Dialogue, Record
from specdraft.data.regeneration.request import Engine, RegenerationSettings
from specdraft.data.regeneration.shards import Header, Shard
from specdraft.data.sources.base import Conversation, list_ids
from specdraft.data.store.contents import tokenizer_hash
from specdraft.data.tokenization.chat import Example
from specdraft.errors import UserError
from specdraft.files import atomic_file, make_directory

if TYPE_CHECKING:
    from specdraft.targets import Target

_VERSION = 2  # of what a shard holds: since 2 a conversation ends at an answer that was cut
CONVERSATIONS_PER_SHARD = 512  # held in memory; a few batches of a GPU, so that lengths can be grouped


class Counts(NamedTuple):
    """Sums over the headers of all shards, as ``shards.Header`` defines them."""

    conversations: int
    turns: int
    tokens: int
    left_out: int
    shortened: int
    unfinished: int
    dropped: int
    refused: int


@dataclass(frozen=True)
class Regeneration:
    """Answered conversations on disk. ``manifest`` lists the shards, their counts and checksums.

    ``refused``: (id, reason) of each conversation that the chat template did not take.
    """

    shards: Sequence[Shard]
    counts: Counts
    manifest: Path
    refused: list[tuple[str, str]]

    def records(self) -> Iterator[Record]:
        """What became of every conversation, in their order. Raises UserError for a damaged shard."""
        return (record for shard in self.shards for record in shard.records())

    def examples(self) -> Iterator[Example]:
        """All examples to learn, in the order of the conversations. Raises UserError for a damaged shard."""
        return (example for record in self.records() for example in record.as_examples())


def regenerate(
    target: "Target",
    conversations: Iterable[Conversation],
    settings: RegenerationSettings,
    cache_dir: Path,
    room: int,
    description: str,
    engine: Engine,
    max_refused: int = 0,
) -> Regeneration:
    """Let the target answer every assistant's turn of every conversation, or find the answers in the cache.

    A turn whose prompt and ``max_new_tokens`` are more than ``room`` tokens ends its conversation. ``description``
    names the conversations ("train conversations"). Raises UserError if the chat template refuses more than
    ``max_refused``, if not one has room, for a damaged cache, and for what the engine cannot do; what was answered
    before stays.
    """
    folder = make_directory(cache_dir / "responses" / cache_key(target, settings, room))
    work = _Work(target, settings, room, engine, description, conversations, max_refused)
    with work.bar:
        shards, others = list[Shard](), list[tuple[Shard, int, list[Conversation]]]()
        for first, part in _parts(conversations):
            shard = Shard(folder, first, part)
            shards.append(shard)
            others.append((shard, first, part))
            # What other processes are at is looked at again, so that few conversations wait here at a time.
            others = [other for other in others if not work.do(*other, wait=False)]
        for other in others:
            work.do(*other, wait=True)
    headers = [work.headers[shard.name] for shard in shards]
    counts = Counts(*(sum(getattr(header, name) for header in headers) for name in Counts._fields))
    if not counts.turns and work.refused and not counts.left_out:
        raise UserError(work.refused[0][1])
    if not counts.turns:
        raise UserError(
            f"none of the {counts.left_out} {description} fits {room} tokens with {settings.max_new_tokens} of "
            "them for an answer: raise data.sequence_length or lower data.max_new_tokens"
        )
    manifest = _write_manifest(folder, target, settings, room, shards, headers)
    return Regeneration(shards, counts, manifest, work.refused)


def cache_key(target: "Target", settings: RegenerationSettings, room: int) -> str:
    """A hash of all that decides the answers, besides the conversations."""
    decisive = _cache_key_fields(target, settings, room)
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:24]


def _cache_key_fields(target: "Target", settings: RegenerationSettings, room: int) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "target": asdict(target.identity),
        "dtype": str(target.dtype),
        "tokenizer": tokenizer_hash(target.tokenizer),
        "end": sorted(target.eos_token_ids),
        "temperatures": list(settings.temperatures),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "room": room,
    }


class _Work:
    """What it takes to answer a shard, and the progress of all of them."""

    def __init__(
        self,
        target: "Target",
        settings: RegenerationSettings,
        room: int,
        engine: Engine,
        description: str,
        conversations: Iterable[Conversation],
        max_refused: int,
    ) -> None:
        self.target, self.settings, self.room, self.engine = target, settings, room, engine
        self.description, self.max_refused = description, max_refused
        self.headers: dict[str, Header] = {}
        self.refused: list[tuple[str, str]] = []
        total = len(conversations) if isinstance(conversations, Sequence) else None
        self.bar = tqdm(
            total=total,
            desc=f"target answers {description}",
            unit=" conversations",
            dynamic_ncols=True,
            disable=int(os.environ.get("LOCAL_RANK", 0)) > 0,  # one bar of a machine says enough
        )
        self._tokens, self._started = 0, time.perf_counter()

    def do(self, shard: Shard, first: int, conversations: Sequence[Conversation], wait: bool) -> bool:
        """See to it that the shard is there; False if another process is at it and we do not ``wait``."""
        header = shard.header()
        if header is None:
            with shard.exclusive(wait) as held:
                if not held:
                    return False
                header = shard.header() or self._answer(shard, first, conversations)
        self.headers[shard.name] = header
        self.bar.update(header.conversations)
        if header.refused:
            pairs = zip(conversations, shard.records(), strict=True)
            self.refused += [(talk.id, record.refused) for talk, record in pairs if record.refused]
            self._check_refused()
        return True

    def _check_refused(self) -> None:
        """Before more is answered. Raises UserError."""
        if len(self.refused) > self.max_refused:
            seen = sum(header.conversations for header in self.headers.values())
            names = list_ids([name for name, _ in self.refused])
            raise UserError(
                f"{len(self.refused)} of the first {seen} {self.description} are refused by the target's chat "
                f"template ({names}), and data.source.max_malformed is {self.max_refused}: mend them or raise it; the "
                f"first: {self.refused[0][1]}"
            )

    def _answer(self, shard: Shard, first: int, conversations: Sequence[Conversation]) -> Header:
        dialogues = [
            Dialogue(self.target, conversation, first + place, self.settings, self.room)
            for place, conversation in enumerate(conversations)
        ]
        with shard.journal() as journal:
            turn = 0
            while asked := {place: r for place, dialogue in enumerate(dialogues) if (r := dialogue.request())}:
                answers, places = journal.known(turn), list(asked)
                known = {number for number, place in enumerate(places) if place in answers}
                for number, ids in self.engine.answers(self.target, list(asked.values()), self.settings, known):
                    answers[places[number]] = ids
                    journal.write(turn, places[number], ids)
                    self._show(ids)
                for place in places:
                    dialogues[place].take(answers[place])
                turn += 1
        return shard.write(self.engine.name, [dialogue.record() for dialogue in dialogues])

    def _show(self, ids: Sequence[int]) -> None:
        self._tokens += len(ids)
        speed = self._tokens / (time.perf_counter() - self._started)
        self.bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
        self.bar.update(0)


def _parts(conversations: Iterable[Conversation]) -> Iterator[tuple[int, list[Conversation]]]:
    """Consecutive conversations with the place of the first, as many as a shard has."""
    rest, first = iter(conversations), 0
    while part := list(islice(rest, CONVERSATIONS_PER_SHARD)):
        yield first, part
        first += len(part)


def _write_manifest(
    folder: Path,
    target: "Target",
    settings: RegenerationSettings,
    room: int,
    shards: Sequence[Shard],
    headers: Sequence[Header],
) -> Path:
    listed = [{"file": shard.path.name, **asdict(header)} for shard, header in zip(shards, headers, strict=True)]
    manifest = _cache_key_fields(target, settings, room) | {"shards": listed}
    name = hashlib.sha256("".join(shard.name for shard in shards).encode()).hexdigest()[:24]
    path = folder / f"manifest-{name}.json"
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return path
