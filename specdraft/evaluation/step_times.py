"""What a round costs: the seconds that drafting and verifying take, by shape of the draft and by batch size.

Measured in the decode loop itself, so that nothing of a round is forgotten: the forward passes, the masks of trees, the
sampling, the rule, what the drafter reads back.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.rules import Rule, rejection_sampling
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target

_ROUNDS = 6  # at least so many rounds in a measurement of a draft that is accepted half
_SEEDS = 1000  # above temperature 0 each pass samples another text

Cell = tuple[int, Shape | None]
"""A batch size, and a shape or None: decoding without a draft."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one round of all requests that are decoded side by side: medians over repeated measurements."""

    draft: float
    verify: float


def measure_step_times(
    target: "Target",
    drafter: "Drafter",
    text: Sequence[int],
    shapes: Sequence[Shape],
    batch_sizes: Sequence[int],
    sampling: Sampling | None = None,
    rule: Rule = rejection_sampling,
    seconds: float = 4.0,
) -> dict[Cell, StepTime]:
    """The step times of every shape, and of decoding without a draft, at every batch size.

    text: token ids to go on from, of the length that requests typically have. All cells are measured in turns, at least
    once and until ``seconds`` have passed: a machine that slows down does so for all. A warm-up of the smallest batch
    is not counted.

    The requests of a batch go on from the same text and stay in step. (A mixture-of-experts target reads fewer experts
    for them than for requests that differ.) A cell is absent if its text ended at once.
    """
    decoders: dict[Shape | None, Decoder] = {None: Decoder(target, sampling=sampling)}
    decoders.update((shape, Decoder(target, drafter, shape, sampling, rule)) for shape in shapes)
    measured: dict[Cell, list[tuple[float, float]]] = {}
    started = time.perf_counter()
    for number in count():
        if number > 1 and time.perf_counter() - started > seconds:
            break
        for batch_size in batch_sizes if number else batch_sizes[:1]:
            for shape, decoder in decoders.items():
                tokens = 2 + _ROUNDS * (1 + decoder.num_draft_tokens / 2)
                prompts, seeds = [text] * batch_size, [_SEEDS + number] * batch_size
                slowest = max(
                    decoder.generate_batch(prompts, math.ceil(tokens), batch_size, seeds),
                    key=lambda generation: generation.decode_seconds,
                )
                rounds = len(slowest.drafted) if shape is not None else len(slowest.tokens) - 1
                if number and rounds:
                    draft = slowest.draft_seconds / rounds
                    cell = measured.setdefault((batch_size, shape), [])
                    cell.append((draft, slowest.decode_seconds / rounds - draft))
    return {
        cell: StepTime(*(statistics.median(column) for column in zip(*times, strict=True)))
        for cell, times in measured.items()
    }
