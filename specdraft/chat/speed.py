"""How fast answers were decoded, beside plain decoding: counted as ``specdraft.evaluation`` counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdraft.chat.conversation import Answer
from specdraft.decoding.generation import Generation
from specdraft.decoding.metrics import acceptance_length


@dataclass(frozen=True)
class Speed:
    """Of answers that were all drafted, or all plain; NaN is what was not measured.

    tokens_per_second: of the rounds, without the prompts' passes and the tokens that these emit.
    speedup: seconds that plain decoding takes for as many tokens / seconds that were taken, the decoding speedup of an
    evaluation; over the answers beside which plain decoding was measured."""

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
        compared = sum(map(_emitted, timed))
        taken = sum(each.decode_seconds for each in timed)
        plainly = sum(_emitted(each) * each.plain_seconds / each.plain_rounds for each in timed)
        return cls(
            drafted=any(answer.drafted for answer in answers),
            acceptance_length=acceptance_length(sum(rounds), len(rounds)),
            tokens_per_second=tokens / seconds if seconds else math.nan,
            plain_tokens_per_second=compared / plainly if plainly else math.nan,
            speedup=plainly / taken if taken else math.nan,
        )


def _emitted(generation: Generation) -> int:
    """Tokens of the rounds: the first one comes from the prompt's pass."""
    return len(generation.tokens) - 1
