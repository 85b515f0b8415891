"""Conversations, and what every source of them does.

A source gives the conversations of a split in a fixed order, shuffled by a hash, so that the first N of them are a
random sample and a smaller limit takes a prefix of a larger one."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specdraft.errors import UserError
from specdraft.text import fingerprint

SPLITS = ("train", "validation", "test")
# "role" and "content" are texts; tool calls, names and reasoning stand beside them as chat templates read them.
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A conversation to learn from or to continue, or a document.
    ``prompt_messages`` end where the answer begins; ``response`` is the answer in the source, None if it has none, and
    ``response_extras`` is what the answer has beside its words: tool calls, reasoning. A document has no
    ``prompt_messages`` and is its ``response``. ``tools`` are the JSON schemas of what the assistant may call. ``cut``:
    the answer stops where its writer ran out of room, so that no end is to be learned.
    The user's turns may have no words yet: see ``self_written.py``."""

    id: str
    category: str
    prompt_messages: tuple[Message, ...]
    response: str | None = None
    response_extras: Message = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    cut: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """All turns, the answer included if there is one; none for a document."""
        if self.response is None or not self.prompt_messages:
            return self.prompt_messages
        return (*self.prompt_messages, {"role": "assistant", "content": self.response, **self.response_extras})


@dataclass(frozen=True, eq=False)
class Selection(Sequence[Conversation]):
    """Conversations that are read when they are asked for: memory holds their places and a digest of each.
    ``read`` gives the conversation at a place; ``digests [n, 16]`` are those of ``places``, in their order."""

    read: Callable[[int], Conversation]
    places: Sequence[int] | npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        places = self.places[index]
        return [self.read(int(place)) for place in places] if isinstance(index, slice) else self.read(int(places))

    @property
    def fingerprint(self) -> str:
        """A hash of the content of all conversations and of their order."""
        return fingerprint(self.digests.tobytes())


class Source(Protocol):
    """What preparation needs of a source."""

    name: str

    def conversations(self, split: str, limit: int | None = None) -> Selection:
        """The conversations of a split, in a fixed shuffled order, at most ``limit``. Raises UserError."""

    @property
    def max_malformed(self) -> int:
        """How many conversations without a safe loss mask may be skipped."""


def check_request(split: str, limit: int | None) -> None:
    """Raise UserError for an unknown split or a limit below 1."""
    if split not in SPLITS:
        raise UserError(f"the split {split!r} is unknown: expected one of {', '.join(SPLITS)}")
    if limit is not None and limit < 1:
        raise UserError(f"the limit of conversations is {limit}: expected a positive number, or null for all")


def digest(conversation: Conversation) -> bytes:
    """16 bytes of SHA-256 over the content of a conversation."""
    content: list[Message | str] = [*conversation.messages, *conversation.tools]
    if not conversation.prompt_messages:
        content = [conversation.response or ""]
    if conversation.cut:
        content.append("cut")
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()[:16]


def refusals(refused: Sequence[tuple[str, str]], said: str, limit: int | None = None) -> str:
    """A message about conversations that cannot be learned, by (id, reason): ``said`` completes "2 of".
    It lists the first 20 ids and gives the first reason. With ``limit`` it says that there are more than so many."""
    ids = ", ".join(name for name, _ in refused[:20]) + (" and more" if len(refused) > 20 else "")
    mend = "" if limit is None else f", and data.source.max_malformed is {limit}: mend them or raise it; the first"
    return f"{len(refused)} of {said} ({ids}){mend}: {refused[0][1]}"
