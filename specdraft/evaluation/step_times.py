"""What a round costs: the seconds that drafting and verifying take, by shape of the draft and by batch size.

Measured in the decode loop itself, so that nothing of a round is forgotten: the forward passes, the masks of trees, the
sampling, the rule, what the drafter reads back.
"""

import math
import statistics
import time
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
    """Seconds of one round of all requests that are decoded side by side: medians over repeated measurements."""

    draft: float
    verify: float


class StepTimer:
    """Measures the step times of every shape, and of decoding without a draft, at every batch size.

    The requests of a batch go on from the same text and stay in step. (A mixture-of-experts target reads fewer experts
    for them than for requests that differ.)
    """

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
        self._measured: dict[Cell, list[StepTime]] = {}
        self._passes = 0
        for shape in self.decoders:
            self._time(batch_sizes[0], shape)

    def measure(self) -> None:
        """Measure every cell once more, in turns: a machine that slows down does so for all."""
        self._passes += 1
        for batch_size in self.batch_sizes:
            for shape in self.decoders:
                if (found := self._time(batch_size, shape)) is not None:
                    self._measured.setdefault((batch_size, shape), []).append(found)

    def measure_for(self, seconds: float) -> None:
        """Measure at least once, and again until ``seconds`` have passed."""
        started = time.perf_counter()
        self.measure()
        while time.perf_counter() - started < seconds:
            self.measure()

    def times(self) -> dict[Cell, StepTime]:
        """Medians of what was measured. A cell is absent if its text ended at once."""
        return {
            cell: StepTime(
                statistics.median(each.draft for each in found), statistics.median(each.verify for each in found)
            )
            for cell, found in self._measured.items()
        }

    def _time(self, batch_size: int, shape: Shape | None) -> StepTime | None:
        decoder = self.decoders[shape]
        tokens = 2 + (_STEPS if shape is None else _ROUNDS * (1 + decoder.num_draft_tokens / 2))
        prompts, seeds = [self.text] * batch_size, [_SEEDS + self._passes] * batch_size
        generations = decoder.generate_batch(prompts, math.ceil(tokens), batch_size, seeds)
        slowest = max(generations, key=lambda generation: generation.decode_seconds)
        rounds = len(slowest.drafted) if shape is not None else len(slowest.tokens) - 1
        if not rounds:
            return None
        draft = slowest.draft_seconds / rounds
        return StepTime(draft, slowest.decode_seconds / rounds - draft)
