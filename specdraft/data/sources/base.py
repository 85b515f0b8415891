"""Where conversations come from.

A source yields the conversations of a split in an order that is fair: shuffled by a hash, the same on every run, so
that the first N of them are a random sample and a smaller limit takes a prefix of a larger one.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from specdraft.data.sources import stdlib
from specdraft.errors import UserError

# "role" and "content" are texts; tool calls, names and reasoning stand beside them as chat templates read them.
Message = Mapping[str, Any]

# 99.5 % of the library's prompts are shorter, and 2,000 characters of Python are some 600 tokens: with room for an
# answer they fit a context of 1,024.
MAX_PROMPT_CHARACTERS = 2000


@dataclass(frozen=True)
class Conversation:
    """A conversation to learn from or to continue, or a document that nobody asked for.

    ``prompt_messages`` end where the answer begins; ``response`` is the answer in the source, None if it has none, and
    ``response_extras`` is what the answer has beside its words: tool calls, reasoning. A document has no
    ``prompt_messages`` and is its ``response``. ``tools`` are the JSON schemas of what the assistant may call.
    """

    id: str
    category: str
    prompt_messages: tuple[Message, ...]
    response: str | None = None
    response_extras: Message = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All turns, the answer included if there is one; none of a document."""
        if self.response is None or not self.prompt_messages:
            return self.prompt_messages
        return (*self.prompt_messages, {"role": "assistant", "content": self.response, **self.response_extras})


def named(ids: Sequence[str]) -> str:
    """Conversations by their ids, the first of them if they are many."""
    return ", ".join(ids[:20]) + (" and more" if len(ids) > 20 else "")


class Selection(Sequence[Conversation]):
    """Conversations that are read when they are asked for: memory holds where they stand, and a hash of each."""

    def __init__(
        self,
        read: Callable[[int], Conversation],
        places: Sequence[int] | npt.NDArray[np.int64],
        digests: npt.NDArray[np.uint8],
    ) -> None:
        """``read`` gives the conversation at a place; ``digests [n, 16]`` are those of ``places``, in their order."""
        self._read, self._places, self.digests = read, places, digests

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice):
            return [self._read(int(place)) for place in self._places[index]]
        return self._read(int(self._places[index]))

    @property
    def fingerprint(self) -> str:
        """A hash of what all of them say, and of their order."""
        return hashlib.sha256(self.digests.tobytes()).hexdigest()[:16]


class Source(Protocol):
    """What a data module needs of a source."""

    name: str

    def conversations(self, split: str, limit: int | None = None) -> Selection:
        """The conversations of a split, in a fixed and fair order, at most ``limit``."""

    @property
    def max_malformed(self) -> int:
        """How many conversations without a safe loss mask may be skipped."""


@dataclass(frozen=True)
class PythonStdlib:
    """Documented functions of the running interpreter's own standard library.

    The user gives signature and docstring, the assistant the body; the category is ``function`` or ``method``.
    Splits are by file. Of equal prompts the first counts, and those of the training split are not held out again:
    the library copies some functions from file to file.
    """

    include_tests: bool = False
    root: str | None = None
    name = "python-stdlib"
    max_malformed = 0  # the library is well-formed

    def conversations(self, split: str, limit: int | None = None) -> Selection:
        """The conversations of a split, in a fixed and fair order, at most ``limit``. Raises UserError."""
        check_request(split, limit)
        found = _split_conversations(self.root, self.include_tests, split)
        if not found:
            where = self.root or "the standard library"
            raise UserError(f"{where} has no documented functions in its {split} split: expected Python source files")
        chosen = found[:limit]
        digests = np.frombuffer(b"".join(map(digest, chosen)), dtype=np.uint8).reshape(-1, 16)
        return Selection(chosen.__getitem__, range(len(chosen)), digests)

    def prompts(self, split: str, limit: int | None = None) -> list[Conversation]:
        """Conversations for evaluation: those whose prompts leave room for an answer in a context of 1,024 tokens."""
        short = [c for c in self.conversations(split) if _characters(c) <= MAX_PROMPT_CHARACTERS]
        return short[:limit]


def check_request(split: str, limit: int | None) -> None:
    """Raise UserError for an unknown split or a limit below 1."""
    if split not in stdlib.SPLITS:
        raise UserError(f"the split {split!r} is unknown: expected one of {', '.join(stdlib.SPLITS)}")
    if limit is not None and limit < 1:
        raise UserError(f"the limit of conversations is {limit}: expected a positive number, or null for all")


def digest(conversation: Conversation) -> bytes:
    """16 bytes of SHA-256 over all that a conversation says."""
    said: list[Message | str] = [*conversation.messages, *conversation.tools]
    if not conversation.prompt_messages:
        said = [conversation.response or ""]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).digest()[:16]


def fair_order(conversations: Sequence[Conversation]) -> list[Conversation]:
    """The conversations shuffled by a hash of their ids."""
    return sorted(conversations, key=lambda c: hashlib.sha256(c.id.encode()).digest())


def _characters(conversation: Conversation) -> int:
    return sum(len(message["content"]) for message in conversation.prompt_messages)


@cache  # parsing the library takes seconds, and a run asks for several splits
def _split_conversations(root: str | None, include_tests: bool, split: str) -> tuple[Conversation, ...]:
    taken: set[str] = set()
    if split != "train":
        taken = {c.prompt_messages[0]["content"] for c in _split_conversations(root, include_tests, "train")}
    found: list[Conversation] = []
    for function in _functions(root, include_tests, split):
        if function.prompt not in taken:
            taken.add(function.prompt)
            found.append(_conversation(function))
    return tuple(fair_order(found))


def _functions(root: str | None, include_tests: bool, split: str) -> Iterator[stdlib.Function]:
    folder = Path(root) if root else None
    if folder is not None and not folder.is_dir():
        raise UserError(f"the folder {root} does not exist: expected a folder with Python files, or null")
    for path in stdlib.files(folder):
        if stdlib.split_of(path) == split and (include_tests or not stdlib.is_test(path)):
            yield from stdlib.functions(stdlib.read(path, folder), path)


def _conversation(function: stdlib.Function) -> Conversation:
    return Conversation(
        id=f"{function.path}:{function.line}:{function.name}",
        category="method" if function.is_method else "function",
        prompt_messages=({"role": "user", "content": function.prompt},),
        response=function.body,
    )
