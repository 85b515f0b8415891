"""How fast answers were decoded, beside plain decoding: counted as ``specdraft.evaluation`` counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdraft.chat.conversation import Answer
from specdraft.decoding.generation import Generation
from specdraft.decoding.metrics import acceptance_length

_FEWEST = 4  # plain rounds that say something: one alone may have met whatever else the machine does


@dataclass(frozen=True)
class Speed:
    """Of answers that were all drafted, or all plain; NaN is what was not measured.

    tokens_per_second: of the rounds, without the prompts' passes and the tokens that these emit.
    speedup: that over the rate of the plain rounds that were timed on the way, an evaluation's decoding speedup; of
    the answers that have such rounds, and NaN unless there are at least 4."""

    drafted: bool
    acceptance_length: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Speed":
        """One answer, or several together: each counts by its rounds and its tokens."""
        rounds = [accepted for answer in answers for accepted in answer.generation.accepted]
        tokens = sum(_emitted(answer.generation) for answer in answers)
        seconds = sum(answer.generation.decode_seconds for answer in answers)
        timed = [answer.generation for answer in answers if answer.generation.plain_rounds]
        plain_rounds = sum(each.plain_rounds for each in timed)
        if plain_rounds < _FEWEST:
            timed, plain_rounds = [], 0
        plain_seconds = sum(each.plain_seconds for each in timed)
        compared, taken = sum(map(_emitted, timed)), sum(each.decode_seconds for each in timed)
        plain_rate = plain_rounds / plain_seconds if plain_seconds else math.nan
        return cls(
            drafted=any(answer.drafted for answer in answers),
            acceptance_length=acceptance_length(sum(rounds), len(rounds)),
            tokens_per_second=tokens / seconds if seconds else math.nan,
            plain_tokens_per_second=plain_rate,
            speedup=compared / taken / plain_rate if taken else math.nan,
        )


def _emitted(generation: Generation) -> int:
    """Tokens of the rounds: the first one comes from the prompt's pass."""
    return len(generation.tokens) - 1
