"""Conversations that are held side by side, turn by turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specdraft.data.prompts import Prompt
from specdraft.data.sources.base import Message


@dataclass
class Talk:
    """A conversation that grows: ``prompt``, its place among all; ``turn``, how many questions were answered;
    ``number``, of the question that is asked now, among all of all conversations; ``messages``, up to that question."""

    prompt: int
    number: int
    questions: Sequence[str]  # that follow
    messages: list[Message] = field(default_factory=list)
    turn: int = 0

    def answered(self, answer: str) -> None:
        """Go on to the next question, if there is one."""
        if self.turn < len(self.questions):
            question: Message = {"role": "user", "content": self.questions[self.turn]}
            self.messages += [{"role": "assistant", "content": answer}, question]
        self.turn, self.number = self.turn + 1, self.number + 1


def side_by_side(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Talk]]:
    """``batch_size`` conversations at a time: those that have a question left, once for each of their turns. Every one
    must be ``answered`` before the next are asked for."""
    number, talks = 0, list[Talk]()
    for place, prompt in enumerate(prompts):
        talks.append(Talk(place, number, prompt.follow_ups, list(prompt.opening)))
        number += 1 + len(prompt.follow_ups)
    for first in range(0, len(talks), batch_size):
        group = talks[first : first + batch_size]
        while asked := [talk for talk in group if talk.turn <= len(talk.questions)]:
            yield asked
