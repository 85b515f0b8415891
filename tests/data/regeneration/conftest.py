"""An engine that knows its answers at once, and conversations of several turns."""

import random
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import pytest

from specdraft.data.regeneration.request import Ids, RegenerationSettings, Request
from specdraft.data.sources.base import Conversation
from specdraft.targets import Target


class Scripted:
    """Answers with random words that prompt and seed decide, one request after the other; notes what it was asked."""

    name = "scripted"

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.closed = False

    def answers(
        self,
        target: Target,
        requests: Sequence[Request],
        settings: RegenerationSettings,
        known: Container[int] = frozenset(),
    ) -> Iterator[tuple[int, Ids]]:
        for number, request in enumerate(requests):
            if number not in known:
                self.asked.append(request)
                yield number, self.answer(target, request, settings)

    def answer(self, target: Target, request: Request, settings: RegenerationSettings) -> Ids:
        chance = random.Random(
            f"{request.prompt}/{request.sampling.temperature}/{request.sampling.temperature and request.seed}"
        )
        words = " ".join(chance.choice(["sum", "total", "left", "right", "step"]) for _ in range(chance.randint(1, 4)))
        ids = target.tokenizer(words, add_special_tokens=False)["input_ids"]
        return [*ids, target.tokenizer.eos_token_id][: settings.max_new_tokens]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine() -> Scripted:
    return Scripted()


@pytest.fixture
def talks() -> Callable[[int], list[Conversation]]:
    """Conversations whose user speaks once, twice, three times, once, ..."""

    def make(count: int) -> list[Conversation]:
        found = []
        for number in range(count):
            messages: list[dict[str, Any]] = []
            for turn in range(number % 3 + 1):
                messages += [
                    {"role": "user", "content": f"question {number} of {turn}"},
                    {"role": "assistant", "content": f"people's own words {number}"},
                ]
            found.append(Conversation(f"FILE:{number}", "test", tuple(messages[:-1]), messages[-1]["content"]))
        return found

    return make
