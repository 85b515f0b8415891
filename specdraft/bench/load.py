"""How requests come: so many at a time, or at a rate.

What a reader waits for depends on it: at a concurrency the next request is sent when one ends, at a rate requests come
whether or not the engine keeps up (Poisson arrivals: independent of each other, as those of many people are)."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from specdraft.bench.streaming import Answer, Asking, Question, ask, new_client
from specdraft.errors import UserError

CONCURRENCY, RATE = "concurrency", "rate"
_BLOCK = 4  # requests for each of those at a time: fewer, and a block is mostly its end, where the engine runs empty


@dataclass(frozen=True)
class Load:
    """kind: concurrency, of ``value`` requests at a time, or rate, of ``value`` requests a second."""

    kind: str
    value: float

    def __post_init__(self) -> None:
        if self.kind == CONCURRENCY and (self.value < 1 or self.value != int(self.value)):
            raise UserError(f"concurrency holds {self.value:g}: expected whole numbers of requests from 1 upwards")
        if self.value <= 0:
            raise UserError(f"rate holds {self.value:g}: expected positive numbers of requests a second")

    def __str__(self) -> str:
        requests = "request" if self.value == 1 else "requests"
        return f"{self.value:g} {requests} {'a second' if self.kind == RATE else 'at a time'}"

    def blocks(self, questions: Sequence[Question], seed: int) -> list[list[Question]]:
        """What contenders take turns on: at a concurrency parts of the questions, in an order that follows from the
        seed, as many as leave each of them long enough; at a rate all."""
        shuffled = random.Random(seed).sample(list(questions), len(questions))
        number = max(1, len(shuffled) // int(_BLOCK * self.value)) if self.kind == CONCURRENCY else 1
        return [shuffled[start::number] for start in range(number)]

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds after the beginning at which ``count`` requests come; all at once at a concurrency."""
        if self.kind == CONCURRENCY:
            return [0.0] * count
        chance, now, found = random.Random(seed), 0.0, []
        for _ in range(count):
            found.append(now)
            now += chance.expovariate(self.value)
        return found


def send(
    url: str, model: str, questions: Sequence[Question], load: Load, asking: Asking, seed: int = 0, key: str = ""
) -> tuple[list[Answer], float]:
    """The answers in the order of the questions, and the seconds that all of them took.
    Raises UserError where the server refuses one; the others are then given up."""
    return asyncio.run(_send(url, model, questions, load, asking, seed, key))


async def _send(
    url: str, model: str, questions: Sequence[Question], load: Load, asking: Asking, seed: int, key: str
) -> tuple[list[Answer], float]:
    at_a_time = int(load.value) if load.kind == CONCURRENCY else len(questions)
    places = asyncio.Semaphore(at_a_time)
    started = time.perf_counter()

    async def one(client: httpx.AsyncClient, question: Question, at: float) -> Answer:
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        async with places:
            return await ask(client, url, model, question, asking)

    async with new_client(at_a_time, key) as client:
        try:
            async with asyncio.TaskGroup() as group:
                times = load.arrivals(len(questions), seed)
                tasks = [group.create_task(one(client, q, at)) for q, at in zip(questions, times, strict=True)]
        except* UserError as errors:
            raise errors.exceptions[0] from None
    return [task.result() for task in tasks], time.perf_counter() - started
