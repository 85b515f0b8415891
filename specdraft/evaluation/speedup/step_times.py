"""What a round costs: the seconds that drafting and verifying take, by shape of the draft and by batch size.

Measured in the decode loop itself, so that nothing of a round is forgotten: the forward passes, the masks of trees, the
sampling, the rule, what the drafter reads back.

Means, because a speedup is a ratio of sums. Where other work interrupts the machine, long passes meet an interruption
more often than short ones, and a median would count it for the long ones alone. But where little is measured, one
interruption of half a second would be most of it."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.rules import Rule, rejection_sampling
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

_ROUNDS = 6  # at least so many rounds in a measurement of a draft that is accepted half
_STEPS = 24  # without a draft: more, because the first steps behind a prompt's pass are slower
_SEEDS = 1000  # above temperature 0 each pass samples another text

Cell = tuple[int, Shape | None]
"""A batch size, and a shape or None: decoding without a draft."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one round of all requests that are decoded side by side."""

    draft: float
    verify: float

    @property
    def whole(self) -> float:
        """Of both."""
        return self.draft + self.verify


class StepTimer:
    """Measures the step times of every shape, and of decoding without a draft, at every batch size.
    The requests of a batch go on from the same text and stay in step. A mixture-of-experts target reads fewer experts
    for them than for requests that differ."""

    def __init__(
        self,
        target: "Target",
        drafter: "Drafter",
        text: Sequence[int],
        shapes: Sequence[Shape],
        batch_sizes: Sequence[int],
        sampling: Sampling | None = None,
        rule: Rule = rejection_sampling,
    ) -> None:
        """text: token ids to go on from, of the length that requests typically have. Warms up with the first batch."""
        self.text, self.batch_sizes = text, batch_sizes
        self.decoders: dict[Shape | None, Decoder] = {None: Decoder(target, sampling=sampling)}
        self.decoders.update((shape, Decoder(target, drafter, shape, sampling, rule)) for shape in shapes)
        # Of every pass: rounds, seconds of drafting, seconds of verifying.
        self._found = defaultdict[Cell, list[tuple[int, float, float]]](list)
        self._passes = 0
        for shape in self.decoders:
            self._time(batch_sizes[0], shape)

    def measure(self) -> None:
        """Measure every cell once more, in turns: a machine that slows down does so for all."""
        self._passes += 1
        for batch_size in self.batch_sizes:
            for shape in self.decoders:
                self._found[batch_size, shape].append(self._time(batch_size, shape))

    def measure_for(self, seconds: float, least: int = 1) -> None:
        """Measure at least so many times, and again until ``seconds`` have passed."""
        started, enough = time.perf_counter(), self._passes + least
        while self._passes < enough or time.perf_counter() - started < seconds:
            self.measure()

    def times(self) -> dict[Cell, StepTime]:
        """Means of what was measured. A cell is absent if its text ended at once."""
        sums = {cell: tuple(map(sum, zip(*passes, strict=True))) for cell, passes in self._found.items()}
        return {cell: StepTime(draft / n, verify / n) for cell, (n, draft, verify) in sums.items() if n}

    def typical(self) -> dict[Cell, StepTime]:
        """Of every cell the pass whose rounds took the middle time: an interruption of one pass does not count."""
        found = {}
        for cell, passes in self._found.items():
            ordered = sorted(
                (StepTime(draft / n, verify / n) for n, draft, verify in passes if n), key=lambda each: each.whole
            )
            if ordered:
                found[cell] = ordered[(len(ordered) - 1) // 2]
        return found

    def _time(self, batch_size: int, shape: Shape | None) -> tuple[int, float, float]:
        """Rounds of one pass, seconds of drafting and of verifying in them."""
        decoder = self.decoders[shape]
        tokens = 2 + (_STEPS if shape is None else _ROUNDS * (1 + decoder.num_draft_tokens / 2))
        prompts, seeds = [self.text] * batch_size, [_SEEDS + self._passes] * batch_size
        generations = decoder.generate_batch(prompts, math.ceil(tokens), batch_size, seeds)
        slowest = max(generations, key=lambda generation: generation.decode_seconds)
        rounds = len(slowest.drafted) if shape is not None else len(slowest.tokens) - 1
        return rounds, slowest.draft_seconds, slowest.decode_seconds - slowest.draft_seconds
