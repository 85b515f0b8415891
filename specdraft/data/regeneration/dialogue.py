"""A conversation whose assistant is the target: each of its turns is answered again, from the answers so far.

This is what serving does. The next prompt is the chat template's rendering of the answers in words, so whatever the
template drops of earlier turns, reasoning above all, is not in the next prompt either. Turns of users, systems and
tools are kept. So are the assistant's turns that call tools, where something follows them: the result that comes next
belongs to that call. A user's turn without words is written by the target as well (``sources/self_written.py``)."""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from specdraft.data.regeneration.questions import flaw, normalized
from specdraft.data.regeneration.request import Ids, RegenerationSettings, Request
from specdraft.data.sources.base import Conversation, Message
from specdraft.data.sources.self_written import brief_of
from specdraft.data.tokenization.chat import (
    Example,
    RefusedError,
    answer_in_words,
    opening_ids,
    prompt_ids,
    question_ids,
)
from specdraft.decoding.sampling import Sampling
from specdraft.targets import Target

Span = tuple[int, int]


@dataclass
class Outcome:
    """What became of a conversation.

    ``examples``: token ids with the (start, end) of each answer in them; ``questions``: what the target asked itself.
    Four things end a conversation early. ``shortened``: a turn after the first had no room. ``unfinished``:
    ``max_new_tokens`` cut the last answer; ``dropped`` turns of the assistant would have followed it. ``refused``: why
    the chat template did not take the next turn, empty if it did. ``rejected``: why the target's own next question was
    not asked, empty if there was none or it was."""

    id: str
    examples: list[tuple[Ids, list[Span]]] = field(default_factory=list)
    shortened: bool = False
    unfinished: bool = False
    dropped: int = 0
    refused: str = ""
    questions: list[str] = field(default_factory=list)
    rejected: str = ""

    @property
    def answers(self) -> list[Ids]:
        """Token ids of every answer, in the order of the conversation."""
        return [ids[start:end] for ids, spans in self.examples for start, end in spans]

    def as_examples(self) -> list[Example]:
        """The examples to learn, with a mask that is True on the answers."""
        found = []
        for ids, spans in self.examples:
            mask = [False] * len(ids)
            for start, end in spans:
                mask[start:end] = [True] * (end - start)
            found.append(Example(ids, mask))
        return found


class Dialogue:
    """One conversation under way: ``request`` and ``take`` in turns until there is no request, then ``outcome``."""

    def __init__(
        self,
        target: Target,
        conversation: Conversation,
        number: int,
        settings: RegenerationSettings,
        room: int,
        asked: set[str] | None = None,
    ) -> None:
        """``number`` is the conversation's place, which decides temperature and seeds; ``room`` counts tokens.
        ``asked`` are the target's own questions so far, which this adds to and does not repeat."""
        self.target, self.conversation, self.number = target, conversation, number
        self.settings, self.room, self._asked = settings, room, set() if asked is None else asked
        self._rest = _turns(conversation)
        self._said: list[Message] = []
        self._prompt: Ids = []
        self._question_end = -1  # the id that ends a question which the target is writing
        self._turns = 0
        self.outcome = Outcome(conversation.id)

    def request(self) -> Request | None:
        """The next turn to write; None at the conversation's end, and where a turn has no room or is refused."""
        while self._rest and not _is_asked(self._rest):
            self._said.append(self._rest.popleft())
        if not self._rest:
            return None
        brief = brief_of(self._rest[0])
        try:
            if brief is not None:
                system = [{"role": "system", "content": brief["system"]}] if brief["system"] else []
                self._prompt, self._question_end = question_ids(self.target.tokenizer, [*system, *self._said])
            elif self._said:
                self._prompt = prompt_ids(self.target.tokenizer, self._said, self.conversation.tools)
            else:
                self._prompt = opening_ids(self.target.tokenizer, self.conversation)
        except RefusedError as error:
            self.outcome.refused = str(error)
            self._rest.clear()
            return None
        sampling = self.settings.sampling(self.target, self.number)
        name, length = f"{self.settings.seed}/{self.number}/{self._turns}", self.settings.max_new_tokens
        if brief is not None:
            sampling, length = Sampling(brief["temperature"]), brief["max_new_tokens"]
            name = f"{self.settings.seed}/{brief['name']}"
        if len(self._prompt) + length > self.room:
            self._end_early()
            return None
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        said = () if brief is not None else tuple(self._said)
        return Request(self._prompt, said, self.conversation.tools, sampling, seed, length)

    def take(self, answer: Ids) -> None:
        """The ids that the target answered the last request with. None at all end the conversation, and so does an
        answer without an end mark, which is learned as it is: the later turns would continue from half a sentence.
        A question of its own that is flawed, cut or asked before ends the conversation too."""
        if self._rest and brief_of(self._rest[0]) is not None:
            self._take_question(answer)
            return
        if not answer:
            self._end_early()
            return
        self._rest.popleft()
        self._turns += 1
        whole, examples = [*self._prompt, *answer], self.outcome.examples
        spans = [(len(self._prompt), len(whole))]
        if examples and self._prompt[: len(examples[-1][0])] == examples[-1][0]:
            spans = [*examples.pop()[1], *spans]
        examples.append((whole, spans))
        self._said.append(_reply(self.target, answer))
        if answer[-1] not in self.target.eos_token_ids:
            self.outcome.unfinished = True
            while self._rest:
                self.outcome.dropped += _is_asked(self._rest) and brief_of(self._rest[0]) is None
                self._rest.popleft()

    def _take_question(self, ids: Ids) -> None:
        ends = {self._question_end, *self.target.eos_token_ids}
        length = next((place for place, token in enumerate(ids) if token in ends), len(ids))
        question = answer_in_words(self.target.tokenizer, ids[:length]).strip()
        plain = normalized(question)
        amiss = "cut" if length == len(ids) else flaw(question) or ("asked before" if plain in self._asked else "")
        if amiss:
            self.outcome.rejected = amiss
            self._rest.clear()
            return
        self._asked.add(plain)
        self.outcome.questions.append(question)
        self._said.append({"role": self._rest.popleft()["role"], "content": question})

    def _end_early(self) -> None:
        self._rest.clear()
        self.outcome.shortened = self._turns > 0


def answered_messages(conversation: Conversation, outcome: Outcome, target: Target) -> list[dict[str, Any]]:
    """The conversation with the target's words in the place of the assistant's, as far as it was answered, and where
    the user's had none. A document becomes one turn of the assistant's: its continuation."""
    answers, questions, rest = deque(outcome.answers), deque(outcome.questions), _turns(conversation)
    said: list[dict[str, Any]] = []
    while answers:
        asked, message = _is_asked(rest), rest.popleft()
        if asked and brief_of(message) is not None:
            said.append({"role": message["role"], "content": questions.popleft()})
        else:
            said.append(_reply(target, answers.popleft()) if asked else dict(message))
    return said


def _turns(conversation: Conversation) -> deque[Message]:
    return deque([*conversation.prompt_messages, {"role": "assistant"}])


def _is_asked(rest: deque[Message]) -> bool:
    """Whether the target writes the first of these messages."""
    if brief_of(rest[0]) is not None:
        return True
    return rest[0]["role"] == "assistant" and not (rest[0].get("tool_calls") and len(rest) > 1)


def _reply(target: Target, answer: Ids) -> dict[str, Any]:
    ids = answer[:-1] if answer[-1] in target.eos_token_ids else answer
    return {"role": "assistant", "content": answer_in_words(target.tokenizer, ids)}
