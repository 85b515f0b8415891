"""Contenders in turns: each block of requests goes to all of them, and each of them is the first as often.

What the machine does beside, and how warm it is, then falls on all alike. Second turns follow the answers of the first
contender, which are asked for before anything is measured, so that every contender is asked the same."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdraft.bench.counters import Counters, read_counters
from specdraft.bench.energy import EnergyMeter
from specdraft.bench.load import CONCURRENCY, Load, send
from specdraft.bench.process import Server
from specdraft.bench.streaming import Answer, Asking, Question
from specdraft.data.prompts import Prompt
from specdraft.errors import UserError

_WARM_UP = 2  # questions


@dataclass
class Block:
    """What a contender did with some questions. seconds: from the first question sent to the last answer; counters:
    what the engine counted meanwhile; joules: of the whole machine, None where that cannot be measured."""

    contender: str
    load: Load
    answers: list[Answer]
    seconds: float
    counters: Counters | None = None
    joules: float | None = None


class Bar(Protocol):
    """Progress."""

    def update(self) -> object:
        """One more block is done."""


@dataclass
class Place:
    """Where a contender is served. server: its process, if it is ours."""

    url: str
    model: str
    server: Server | None = None


@dataclass
class Bench:
    """places: by contender; the first is what others are compared with. meter: of energy."""

    places: Mapping[str, Place]
    asking: Asking
    meter: EnergyMeter
    seed: int = 0
    key: str = ""
    cache_tokens: dict[str, int | None] = field(default_factory=dict)

    def questions(self, prompts: Sequence[Prompt], concurrency: int) -> list[Question]:
        """Every turn of every prompt. Raises UserError where the first contender gives no answer to follow."""
        asked = [Question(i, 0, prompt.category, prompt.opening) for i, prompt in enumerate(prompts)]
        found, name = list(asked), next(iter(self.places))
        while asked := [each for each in asked if each.turn < len(prompts[each.number].follow_ups)]:
            block = self._send(name, asked, Load(CONCURRENCY, concurrency), 0)
            _refuse_failures(name, block.answers)
            asked = [
                Question(
                    each.question.number,
                    each.question.turn + 1,
                    each.question.category,
                    (
                        *each.question.messages,
                        {"role": "assistant", "content": each.text},
                        {"role": "user", "content": prompts[each.question.number].follow_ups[each.question.turn]},
                    ),
                )
                for each in block.answers
            ]
            found += asked
        return found

    def warm_up(self, questions: Sequence[Question]) -> None:
        """The first passes of every server, which compile and allocate. Raises UserError where they fail."""
        for name, place in self.places.items():
            block = self._send(name, questions[:_WARM_UP], Load(CONCURRENCY, _WARM_UP), 0)
            _refuse_failures(name, block.answers)
            found = read_counters(place.url)
            self.cache_tokens[name] = found.cache_tokens if found else None

    def run(self, questions: Sequence[Question], loads: Sequence[Load], rounds: int, bar: Bar) -> Iterator[Block]:
        """Round by round, load by load, block by block, the contenders in turns. Raises UserError where ours dies."""
        names, number = list(self.places), 0
        for round_number in range(rounds):
            for load in loads:
                for own in load.blocks(questions, self.seed + round_number):
                    first = number % len(names)
                    for name in names[first:] + names[:first]:
                        yield self._send(name, own, load, self.seed + number)
                        bar.update()
                    number += 1

    def count(self, questions: Sequence[Question], loads: Sequence[Load], rounds: int) -> int:
        """How many blocks ``run`` gives."""
        return len(self.places) * rounds * sum(len(load.blocks(questions, 0)) for load in loads)

    def _send(self, name: str, questions: Sequence[Question], load: Load, seed: int) -> Block:
        place = self.places[name]
        before = read_counters(place.url)
        self.meter.read()
        answers, seconds = send(place.url, place.model, questions, load, self.asking, seed, self.key)
        joules, after = self.meter.read(), read_counters(place.url)
        if place.server is not None:
            place.server.check()
        counted = after.since(before) if after is not None and before is not None else None
        return Block(name, load, answers, seconds, counted, joules)


def _refuse_failures(name: str, answers: Sequence[Answer]) -> None:
    if failed := [each for each in answers if each.error]:
        said = f"{len(failed)} of the first {len(answers)} requests to {name} failed ({failed[0].error})"
        raise UserError(f"{said}: expected answers; see to the server, or raise request.timeout and request.stall")


def percentile(values: Sequence[float], share: float) -> float | None:
    """Between the values around it, in proportion (as numpy's ``linear``); None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
