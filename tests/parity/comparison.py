"""The same prompts through our decoder and through a serving engine: everything countable must be equal.

Above temperature 0 the two draw other numbers, so that only rates can be compared: ``rate_difference``.

An engine that reads a drafter wrongly (other layer ids, another vocabulary map) still emits the target's own tokens,
only slower. So equal tokens say nothing about the drafter; equal counts, round by round and position by position, do.
In float32, where verifying K + 1 tokens at once rounds too little to change an argmax, they are exactly equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.evaluation.bootstrap import bootstrap_interval

COUNTS = ("rounds", "drafted", "accepted", "accepted_per_position")


@dataclass(frozen=True)
class Run:
    """What one system did, by prompt: emitted tokens, and per round the tokens drafted and accepted.

    counts: the system's own totals under the names of ``COUNTS``; empty where it did not draft.
    """

    tokens: list[list[int]]
    drafted_per_round: list[list[int]]
    accepted_per_round: list[list[int]]
    counts: dict[str, int | list[int]]

    @property
    def acceptance_length(self) -> float:
        """Of the system's own totals."""
        totals: Any = self.counts
        return AcceptanceCounts(0, rounds=totals["rounds"], accepted=totals["accepted"]).acceptance_length


def decode(decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int = 1) -> Run:
    """Our half: the evaluator's own decoder and counts, requests side by side. Rounds in which nothing was drafted are
    left out, as an engine takes no notice of them."""
    counts = AcceptanceCounts(decoder.num_draft_tokens)
    generations = decoder.generate_batch(prompts, max_new_tokens, batch_size)
    for generation in generations:
        rounds = [both for both in zip(generation.drafted, generation.accepted, strict=True) if both[0]]
        generation.drafted, generation.accepted = ([both[i] for both in rounds] for i in (0, 1))
        counts.add(generation)
    return Run(
        [generation.tokens for generation in generations],
        [generation.drafted for generation in generations],
        [generation.accepted for generation in generations],
        {name: getattr(counts, name) for name in COUNTS},
    )


def differences(ours: Run, plain: Run, speculative: Run, least_acceptance_length: float) -> list[str]:
    """All that is not as it should be, a sentence each; empty if the engine serves the drafter exactly as trained.

    plain, speculative: the engine without drafting and with it. ``least_acceptance_length`` keeps one
    that is never accepted from passing as equal.
    """
    found = [
        *_token_differences("the engine with the drafter", speculative, "the engine without drafting", plain),
        *_token_differences("our decoder", ours, "the engine without drafting", plain),
    ]
    for index, (a, b) in enumerate(zip(ours.accepted_per_round, speculative.accepted_per_round, strict=True)):
        drafted = ours.drafted_per_round[index], speculative.drafted_per_round[index]
        if a != b or drafted[0] != drafted[1]:
            at = next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)
            where = "the drafted lengths" if at is None else f"round {at + 1}"
            found.append(
                f"prompt {index}: {where} differ: accepted {a} drafted {drafted[0]} by our decoder, "
                f"accepted {b} drafted {drafted[1]} by the engine"
            )
    for name in COUNTS:
        if ours.counts[name] != speculative.counts[name]:
            found.append(f"{name}: {ours.counts[name]} by our decoder, {speculative.counts[name]} by the engine")
    if not speculative.acceptance_length > least_acceptance_length:
        found.append(
            f"the acceptance length is {speculative.acceptance_length:.3f}: equality means nothing for a drafter that "
            f"is not accepted; expected above {least_acceptance_length}"
        )
    return found


def rate_difference(ours: Run, theirs: Run, confidence: float = 0.999) -> tuple[float, tuple[float, float]]:
    """Their acceptance length minus ours, with its interval over prompts: 0 lies outside by chance once in 1,000."""
    sums = [
        [part for run in (theirs, ours) for part in (sum(run.accepted_per_round[i]), len(run.accepted_per_round[i]))]
        for i in range(len(ours.tokens))
    ]
    columns = torch.tensor(sums, dtype=torch.float64)

    def difference(total: Tensor) -> Tensor:
        return total[:, 0] / total[:, 1] - total[:, 2] / total[:, 3]

    interval = bootstrap_interval(columns, difference, confidence)
    assert interval is not None
    return float(difference(columns.sum(0, keepdim=True))), interval


def table(ours: Run, plain: Run, speculative: Run) -> str:
    """The three runs side by side."""
    names = ("our decoder", "vLLM + drafter", "vLLM alone")
    runs = (ours, speculative, plain)
    prompts = len(plain.tokens)
    rows = [
        ("tokens emitted", *(str(sum(map(len, run.tokens))) for run in runs)),
        ("prompts as vLLM alone", *(f"{_equal(run, plain)}/{prompts}" for run in runs)),
        ("rounds (drafts)", *(_shown(run, "rounds") for run in runs)),
        ("draft tokens", *(_shown(run, "drafted") for run in runs)),
        ("accepted tokens", *(_shown(run, "accepted") for run in runs)),
        ("accepted per position", *(_shown(run, "accepted_per_position") for run in runs)),
        ("acceptance length", *(f"{run.acceptance_length:.4f}" if run.counts else "–" for run in runs)),
    ]
    lines = [("", *names), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )


def _token_differences(name: str, run: Run, reference_name: str, reference: Run) -> list[str]:
    found = []
    for index, (tokens, expected) in enumerate(zip(run.tokens, reference.tokens, strict=True)):
        if tokens != expected:
            at = next(i for i, (x, y) in enumerate(zip_longest(tokens, expected)) if x != y)
            found.append(
                f"prompt {index}: {name} and {reference_name} differ from token {at} on: "
                f"{tokens[at : at + 3]} and {expected[at : at + 3]}"
            )
    return found


def _equal(run: Run, reference: Run) -> int:
    return sum(a == b for a, b in zip(run.tokens, reference.tokens, strict=True))


def _shown(run: Run, name: str) -> str:
    count = run.counts.get(name)
    if count is None:
        return "–"
    return " ".join(map(str, count)) if isinstance(count, list) else str(count)
