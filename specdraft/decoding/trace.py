"""A record of decoding, round by round: what was drafted, how much of it was accepted, what the target put behind it.

It is there to be looked at; counting needs no more than ``Generation``.
"""

from dataclasses import dataclass, field

from specdraft.decoding.rules import Verdict
from specdraft.decoding.tree import ROOT, DraftTree


@dataclass(frozen=True)
class Round:
    """One verified draft. drafted: the accepted tokens, and behind them those that the draft would have gone on with.

    Of a chain that is the whole draft. Of a tree it is one path: the accepted one, continued by first children.
    accepted: how many of them the target took. next_token: the target's own, a correction or a bonus.
    """

    drafted: list[int]
    accepted: int
    next_token: int

    @classmethod
    def of(cls, tree: DraftTree, verdict: Verdict) -> "Round":
        """The round in which ``tree`` met this verdict."""
        path = list(verdict.path)
        while below := tree.children.get(path[-1] if path else ROOT):
            path.append(below[0])
        return cls(tree.tokens[path].tolist(), len(verdict.path), verdict.next_token)


@dataclass
class Trace:
    """A request. prompt: its token ids; first_token: what the prompt's pass emitted, which nobody drafted.

    Rounds are whole: the last may run past the end of text or the token limit, where ``Generation.tokens`` is cut.
    """

    prompt: list[int]
    first_token: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All tokens that the rounds emitted, not cut."""
        emitted = [self.first_token]
        for each in self.rounds:
            emitted += [*each.drafted[: each.accepted], each.next_token]
        return emitted
