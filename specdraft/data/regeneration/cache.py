"""Regeneration: conversations in, shards of answered ones on disk, read back one shard at a time.

Nothing is answered twice. The folder is named by what decides the answers; the engine that gave them is not part of
that, because all engines serve the same target: a manifest says which it was. Several processes that ask for the same
conversations share the shards, and leave when all are there: on one disk, or through a bucket, to which each brings the
shards that it has finished and from which it takes those of the others."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdraft.data.bucket import Bucket
from specdraft.data.regeneration.dialogue import Dialogue, Outcome
from specdraft.data.regeneration.request import Engine, RegenerationSettings
from specdraft.data.regeneration.shards import Counts, Header, Journal, Shard
from specdraft.data.sources.base import Conversation, refusals
from specdraft.data.tokenization.chat import tokenizer_fingerprint
from specdraft.decoding.served import SERVED, served
from specdraft.errors import UserError
from specdraft.files import atomic_file, exclusive, make_directory
from specdraft.targets import Target
from specdraft.text import fingerprint

_VERSION = 2  # of a shard's content: since 2 a conversation ends at an answer that was cut
CONVERSATIONS_PER_SHARD = 512  # held in memory; a few batches of a GPU, so that lengths can be grouped


@dataclass(frozen=True)
class Regeneration:
    """Answered conversations on disk. ``manifest`` lists the shards, their counts and checksums.
    ``refused``: (id, reason) of each conversation that the chat template did not take."""

    shards: Sequence[Shard]
    counts: Counts
    manifest: Path
    refused: list[tuple[str, str]]

    def outcomes(self) -> Iterator[Outcome]:
        """What became of every conversation, in their order. Raises UserError for a damaged shard."""
        return (outcome for shard in self.shards for outcome in shard.outcomes())


def regenerate(
    target: Target,
    conversations: Iterable[Conversation],
    settings: RegenerationSettings,
    cache_dir: Path,
    room: int,
    description: str,
    engine: Engine,
    max_refused: int = 0,
    share: str | None = None,
) -> Regeneration:
    """Let the target answer every assistant's turn of every conversation, or find the answers in the cache.
    A turn whose prompt and ``max_new_tokens`` are more than ``room`` tokens ends its conversation. ``description``
    names them ("train conversations"); ``share`` is the URL of a bucket's folder. Raises UserError if the chat template
    refuses more than ``max_refused``, if none has room, for a damaged cache, and for what the engine cannot do; what
    was answered before stays."""
    key = cache_key(target, settings, room)
    folder = make_directory(cache_dir / "responses" / key)
    bucket = Bucket(f"{share.rstrip('/')}/{key}") if share else None
    bar = tqdm(
        total=len(conversations) if isinstance(conversations, Sequence) else None,
        desc=f"target answers {description}",
        unit=" conversations",
        dynamic_ncols=True,
        disable=int(os.environ.get("LOCAL_RANK", 0)) > 0,  # one bar per machine
    )
    work = _Work(target, settings, room, engine, description, max_refused, bar, bucket)
    shards, others = list[Shard](), list[tuple[Shard, int, list[Conversation]]]()
    with bar:
        rest, first = iter(conversations), 0
        while part := list(islice(rest, CONVERSATIONS_PER_SHARD)):
            shards.append(Shard(folder, first, part))
            others.append((shards[-1], first, part))
            first += len(part)
            # The shards of other processes are looked at again, so that few conversations wait here at a time.
            others = [other for other in others if not work.do(*other, wait=False)]
        for other in others:
            work.do(*other, wait=True)
    if bucket is not None:
        bucket.forget(*(shard.name for shard in shards))
    headers = [work.headers[shard.name] for shard in shards]
    counts = Counts(*map(sum, zip(*(header.counts for header in headers), strict=True)))
    if not counts.turns and work.refused and not counts.left_out:
        raise UserError(work.refused[0][1])
    if not counts.turns:
        said = f"none of the {counts.left_out} {description} fits {room} tokens with {settings.max_new_tokens} of them"
        raise UserError(f"{said} for an answer: raise data.sequence_length or lower data.max_new_tokens")
    listed = [{"file": shard.path.name, **header.as_json()} for shard, header in zip(shards, headers, strict=True)]
    manifest = folder / f"manifest-{fingerprint([shard.name for shard in shards], 24)}.json"
    with atomic_file(manifest) as temporary:
        content = _cache_key_fields(target, settings, room) | {"shards": listed}
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return Regeneration(shards, counts, manifest, work.refused)


def cache_key(target: Target, settings: RegenerationSettings, room: int) -> str:
    """A hash of all that decides the answers, besides the conversations."""
    return fingerprint(_cache_key_fields(target, settings, room), 24)


def _cache_key_fields(target: Target, settings: RegenerationSettings, room: int) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "target": asdict(target.identity),
        "dtype": str(target.dtype),
        "tokenizer": tokenizer_fingerprint(target.tokenizer),
        "end": sorted(target.eos_token_ids),
        "temperatures": list(settings.temperatures),
        **({"served": str(served(target))} if SERVED in settings.temperatures else {}),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "room": room,
    }


@dataclass
class _Work:
    """What it takes to answer a shard, and the progress of all of them; ``bar`` is one over the conversations."""

    target: Target
    settings: RegenerationSettings
    room: int
    engine: Engine
    description: str
    max_refused: int
    bar: tqdm
    bucket: Bucket | None
    headers: dict[str, Header] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    def do(self, shard: Shard, first: int, conversations: Sequence[Conversation], wait: bool) -> bool:
        """Answer the shard unless it is there; False if another process is at it and we do not ``wait``.
        Raises UserError once too many conversations are refused, before more is answered."""
        header = self._found(shard)
        if header is None:
            with ExitStack() as stack:
                if not all(stack.enter_context(each) for each in self._holding(shard, wait)):
                    return False
                header = self._found(shard) or self._answer(shard, first, conversations)
                if self.bucket is not None:
                    self.bucket.upload(shard.path, shard.path.name)
        self.headers[shard.name] = header
        self.bar.update(header.counts.conversations)
        if header.counts.refused:
            pairs = zip(conversations, shard.outcomes(), strict=True)
            self.refused += [(talk.id, outcome.refused) for talk, outcome in pairs if outcome.refused]
        if len(self.refused) > self.max_refused:
            seen = sum(header.counts.conversations for header in self.headers.values())
            said = f"the first {seen} {self.description} are refused by the target's chat template"
            raise UserError(refusals(self.refused, said, self.max_refused))
        return True

    def _found(self, shard: Shard) -> Header | None:
        """The shard, if it is here or in the bucket; afterwards it is in both."""
        header, name = shard.header(), shard.path.name
        if self.bucket is not None and header is None and self.bucket.download(name, shard.path):
            return shard.header()
        if self.bucket is not None and header is not None and not self.bucket.exists(name):
            self.bucket.upload(shard.path, name)
        return header

    def _holding(self, shard: Shard, wait: bool) -> Iterator[AbstractContextManager[bool]]:
        """What keeps a shard from being answered twice: on this machine, and among all that share the bucket."""
        yield exclusive(shard.lock, wait)
        if self.bucket is not None:
            yield self.bucket.hold(shard.name, wait=wait)

    def _answer(self, shard: Shard, first: int, conversations: Sequence[Conversation]) -> Header:
        questions = set[str]()  # of this shard; those of others are compared when all are there
        dialogues = [
            Dialogue(self.target, conversation, number, self.settings, self.room, questions)
            for number, conversation in enumerate(conversations, first)
        ]
        turn = 0
        with Journal(shard.journal) as journal:
            while asked := {place: r for place, dialogue in enumerate(dialogues) if (r := dialogue.request())}:
                answers, places = journal.known(turn), list(asked)
                known = {number for number, place in enumerate(places) if place in answers}
                for number, ids in self.engine.answers(self.target, list(asked.values()), self.settings, known):
                    answers[places[number]] = ids
                    journal.write(turn, places[number], ids)
                    self.tokens += len(ids)
                    speed = self.tokens / (time.perf_counter() - self.started)
                    self.bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
                    self.bar.update(0)
                for place in places:
                    dialogues[place].take(answers[place])
                turn += 1
        return shard.write(self.engine.name, [dialogue.outcome for dialogue in dialogues])
