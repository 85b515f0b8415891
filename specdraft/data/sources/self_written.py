"""Conversations of which the target writes both sides: no data set is needed.

A chat model that is given its template's opening of a user's turn, and nothing else, goes on with what users say
(Magpie, arXiv 2406.08464). So these conversations have no words yet: each of the user's turns is a brief by which
regeneration (``data/regeneration/dialogue.py``) lets the target write it, before it answers it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from specdraft.data.sources.base import Conversation, Message, Selection, check_request, digest
from specdraft.errors import UserError

_BRIEF = "written_by_target"


@dataclass(frozen=True)
class SelfWritten:
    """``turns`` questions a conversation, sampled at ``temperature`` up to ``max_question_tokens``.

    There is no end of conversations; ``first`` is the place of the first, so that a later run goes on where an earlier
    one ended, and the two have none in common.

    ``topics`` are system prompts that steer what is asked, each conversation at random by one of them; they are not
    there when the target answers. None among them, or no topics at all: the template's own opening."""

    turns: int = 1
    temperature: float = 0.8
    max_question_tokens: int = 128
    topics: Sequence[str | None] = ()
    first: int = 0
    name = "self"
    max_malformed = 0  # the target's template takes what it wrote itself

    def __post_init__(self) -> None:
        if self.turns < 1 or self.max_question_tokens < 1 or self.temperature <= 0:
            said = f"turns={self.turns}, max_question_tokens={self.max_question_tokens}, temperature={self.temperature}"
            raise UserError(f"data.source has {said}: expected 1 or more of both, and a temperature above 0")
        if self.first < 0:
            raise UserError(f"data.source.first is {self.first}: expected a place, 0 or more")
        if isinstance(self.topics, str) or not all(isinstance(topic, str | None) for topic in self.topics):
            wanted = "a list of system prompts, null among them for none"
            raise UserError(f"data.source.topics is {self.topics!r}: expected {wanted}")

    def conversations(self, split: str, limit: int | None = None) -> Selection:
        """As ``Source`` says; there is no end of them, so that ``limit`` must be given."""
        check_request(split, limit)
        if limit is None:
            raise UserError("data=self has no end: expected data.limit and data.validation_limit, not null")

        def read(place: int) -> Conversation:
            name = f"self/{split}/{place}"
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
            topic = self.topics[number % len(self.topics)] if self.topics else None
            answer: Message = {"role": "assistant", "content": ""}
            asked = [(self._turn(name, topic, turn), answer) for turn in range(self.turns)]
            return Conversation(name, "self", tuple(chain(*asked))[:-1])

        places = np.arange(self.first, self.first + limit)
        digests = [digest(read(int(place))) for place in places]
        return Selection(read, places, np.frombuffer(b"".join(digests), np.uint8).reshape(limit, 16))

    def _turn(self, name: str, topic: str | None, turn: int) -> Message:
        brief = {"name": f"{name}/{turn}", "system": topic, "temperature": self.temperature}
        return {"role": "user", "content": "", _BRIEF: brief | {"max_new_tokens": self.max_question_tokens}}


def brief_of(message: Message) -> Mapping[str, Any] | None:
    """How the target is to write this turn: ``name`` (which decides its seed), ``system``, ``temperature`` and
    ``max_new_tokens``. None if the turn has its words."""
    return message.get(_BRIEF)


def is_self_written(conversation: Conversation) -> bool:
    """Whether the target has yet to write the user's turns."""
    return any(map(brief_of, conversation.prompt_messages))
