"""Blocks as if engines had answered, in given seconds."""

from collections.abc import Sequence

from specdraft.bench.counters import Counters
from specdraft.bench.engines import Contender
from specdraft.bench.load import Load
from specdraft.bench.streaming import Answer, Question
from specdraft.bench.turns import Block

ONE, FOUR = Load("concurrency", 1), Load("concurrency", 4)
CONTENDERS = [
    Contender("plain", "plain"),
    Contender("eagle3 K=1", "eagle3", 1, ("--speculative-config", '{"method": "eagle3", "num_speculative_tokens": 1}')),
    Contender("eagle3 K=3", "eagle3", 3, ("--speculative-config", '{"method": "eagle3", "num_speculative_tokens": 3}')),
]


def answer(number: int, seconds: float, tokens: int = 11, error: str | None = None, ids: Sequence[int] = ()) -> Answer:
    """The first token after a tenth of the time, the last one at its end."""
    question = Question(number, 0, "ab"[number % 2], ({"role": "user", "content": "x"},))
    arrivals = [5.0 + seconds / 10, 5.0 + seconds]
    return Answer(question, 5.0, arrivals, tokens, [*ids] or list(range(tokens)), "", error)


def blocks(speeds: dict[str, dict[Load, float]], prompts: int = 6, joules: float | None = None) -> list[Block]:
    """A block for each contender and load, whose answers take a second divided by its speed."""
    found = []
    for name, by_load in speeds.items():
        for load, speed in by_load.items():
            answers = [answer(n, (1 + n / 10) / speed) for n in range(prompts)]
            counters = Counters(10.0 * prompts, 30.0, 5.0 * prompts, (20.0, 10.0)) if name != "plain" else Counters()
            seconds = sum(each.seconds for each in answers) / load.value
            found.append(Block(name, load, answers, seconds, counters, None if joules is None else joules / speed))
    return found


def three(**options) -> list[Block]:
    """Short drafts win at four requests, long ones at one."""
    return blocks(
        {
            "plain": {ONE: 1.0, FOUR: 1.0},
            "eagle3 K=1": {ONE: 1.5, FOUR: 1.2},
            "eagle3 K=3": {ONE: 2.0, FOUR: 0.8},
        },
        **options,
    )
