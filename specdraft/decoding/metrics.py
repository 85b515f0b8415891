"""Acceptance counts: the one place where speculative decoding is counted, and where its words are defined.

A *round* is one forward pass of the target that verifies a draft and emits at least one token; the prefill is no
round. Position i is the i-th drafted token of a round, counted from 1.

- *acceptance length* tau = tokens emitted / target forwards = 1 + sum_i survival_i, with the bonus or correction token.
- *conditional acceptance rate* at i = accepted at i / rounds that reached i: those that drafted a token at i and
  accepted every token before it.
- *survival* at i = accepted at i / all rounds.
- *draft acceptance rate* = accepted / drafted tokens; (tau - 1) / K when every round drafts K.

Accepted tokens beyond the requested length or the end of text still count, as serving engines count them. Counts are
sums: they add over prompts and ranks, and are divided once, at the end. A rate without a denominator is NaN."""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from specdraft.decoding.generation import Generation


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def acceptance_length(accepted: int, rounds: int) -> float:
    """Tau of so many rounds, in which so many drafted tokens were accepted; NaN without a round."""
    return 1.0 + _ratio(accepted, rounds)


def acceptance_length_error(prompts: Sequence[tuple[int, int]]) -> float:
    """Standard error of tau over prompts like these, of (accepted, rounds) each: that of a ratio of sums (Cochran,
    Sampling Techniques, equation 6.13). NaN below two prompts and without a round."""
    rounds = sum(each for _, each in prompts)
    if len(prompts) < 2 or not rounds:
        return math.nan
    rate = sum(accepted for accepted, _ in prompts) / rounds
    squares = sum((accepted - rate * each) ** 2 for accepted, each in prompts)
    return math.sqrt(len(prompts) / (len(prompts) - 1) * squares) / rounds


@dataclass
class AcceptanceCounts:
    """Sums over rounds for drafts of up to ``num_draft_tokens`` tokens; lists are indexed by position - 1."""

    num_draft_tokens: int
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    reached_per_position: list[int] = field(default_factory=list)  # drafters may draft fewer than K tokens
    accepted_per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for counts in (self.drafted_per_position, self.reached_per_position, self.accepted_per_position):
            counts.extend([0] * (self.num_draft_tokens - len(counts)))

    def add(self, generation: Generation) -> "AcceptanceCounts":
        """Count every round of a generation; returns itself."""
        for drafted, accepted in zip(generation.drafted, generation.accepted, strict=True):
            self.rounds += 1
            self.drafted += drafted
            self.accepted += accepted
            for position in range(drafted):
                self.drafted_per_position[position] += 1
                self.reached_per_position[position] += position <= accepted
                self.accepted_per_position[position] += position < accepted
        return self

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        """The counts of both; they must be of the same draft length."""
        if self.num_draft_tokens != other.num_draft_tokens:
            raise ValueError("counts of different draft lengths do not add up")
        sums: list[Any] = []
        for each in fields(self)[1:]:
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            lists = isinstance(mine, list)
            sums.append([a + b for a, b in zip(mine, theirs, strict=True)] if lists else mine + theirs)
        return AcceptanceCounts(self.num_draft_tokens, *sums)

    @property
    def acceptance_length(self) -> float:
        """tau, weighted by tokens: every round counts alike."""
        return acceptance_length(self.accepted, self.rounds)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return _ratio(self.accepted, self.drafted)

    @property
    def conditional_acceptance_rate(self) -> list[float]:
        """Per position, among the rounds that reached it."""
        return [_ratio(a, r) for a, r in zip(self.accepted_per_position, self.reached_per_position, strict=True)]

    @property
    def survival(self) -> list[float]:
        """Per position, among all rounds."""
        return [_ratio(accepted, self.rounds) for accepted in self.accepted_per_position]

    def to_dict(self) -> dict[str, Any]:
        """The sums and the rates, under the names used everywhere."""
        counts = ("num_draft_tokens", "rounds", "drafted", "accepted", "drafted_per_position", "accepted_per_position")
        rates = ("acceptance_length", "draft_acceptance_rate", "conditional_acceptance_rate", "survival")
        return {name: copy(getattr(self, name)) for name in counts + rates}


def cost_ratio(draft_seconds: float, drafted: float, step_seconds: float) -> float:
    """c: seconds of a drafted token over those of a target step; NaN where nothing was drafted or timed."""
    return draft_seconds / drafted / step_seconds if drafted and step_seconds else math.nan


def predicted_speedup(tau: float, draft_seconds: float, verify_seconds: float, step_seconds: float) -> float:
    """S = tau / (v + K c), from the seconds of a round's drafting, its verification and a target step."""
    return tau * step_seconds / (draft_seconds + verify_seconds)
