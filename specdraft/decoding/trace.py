"""A record of decoding, round by round: what was drafted, how much of it was accepted, what the target added.

It is there to be looked at; counting needs no more than ``Generation``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdraft.decoding.tree import ROOT, DraftTrees

ACCEPTED, REJECTED, CORRECTED, BONUS, OWN = "accepted", "rejected", "corrected", "bonus", "own"
_WINDOW, _CONTEXT = 64, 8  # tokens that are decoded at a time, and those that decide how the next ones read


@dataclass(frozen=True)
class Round:
    """One verified draft. drafted: of a chain all of it; of a tree the accepted path, continued by first children.
    accepted: how many of them the target took. next_token: the target's own, a correction or a bonus."""

    drafted: list[int]
    accepted: int
    next_token: int

    @classmethod
    def of(cls, trees: DraftTrees, index: int, path: list[int], next_token: int) -> "Round":
        """The round in which the tree of that index met this verdict."""
        tokens, parents, accepted = trees.tokens[index].tolist(), trees.parents[index].tolist(), len(path)
        alive = [True] * len(tokens) if trees.alive is None else trees.alive[index].tolist()
        children: dict[int, int] = {}  # the first of every node
        for node, parent in enumerate(parents):
            if alive[node]:
                children.setdefault(parent, node)
        path = list(path)
        while (below := children.get(path[-1] if path else ROOT)) is not None:
            path.append(below)
        return cls([tokens[node] for node in path], accepted, next_token)


@dataclass
class Trace:
    """A request. prompt: its token ids; first_token: what the prompt's pass emitted, which nobody drafted. Rounds are
    whole: the last may run past the end of text or the token limit, where ``Generation.tokens`` ends."""

    prompt: list[int]
    first_token: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All tokens that the rounds emitted."""
        emitted = [self.first_token]
        for each in self.rounds:
            emitted += [*each.drafted[: each.accepted], each.next_token]
        return emitted


@dataclass(frozen=True)
class Segment:
    """A stretch of text of one status: drafted and ``ACCEPTED`` or ``REJECTED``; of the target, ``CORRECTED`` after a
    rejected draft, ``BONUS`` after one that was accepted whole, ``OWN`` where nothing was drafted."""

    text: str
    status: str


def segments(trace: Trace, length: int, tokenizer: Any) -> list[Segment]:
    """The first ``length`` emitted tokens of a trace as text, each round's rejected tokens before the target's own.
    Without a tokenizer tokens are shown as numbers."""
    return SegmentStream(tokenizer).read(trace, length)


class SegmentStream:
    """The segments of a trace that grows, as ``segments`` gives them at its end."""

    def __init__(self, tokenizer: Any) -> None:
        """Without a tokenizer tokens are shown as numbers."""
        self._text = _TextStream(tokenizer)
        self._tokens = self._rounds = 0  # read

    def read(self, trace: Trace, length: int) -> list[Segment]:
        """What the first ``length`` emitted tokens have that was not read before; ``length`` may cut the last round."""
        found = []
        if not self._tokens:
            found.append(Segment(self._text.add([trace.first_token]), OWN))
            self._tokens = 1
        for each in trace.rounds[self._rounds :]:
            left = length - self._tokens
            if left <= 0:
                break
            self._rounds += 1
            kept, rejected = each.drafted[: min(each.accepted, left)], each.drafted[each.accepted :]
            found.append(Segment(self._text.add(kept), ACCEPTED))
            if len(kept) < left:
                found.append(Segment(self._text.instead(rejected), REJECTED))
                status = CORRECTED if rejected else BONUS if kept else OWN
                found.append(Segment(self._text.add([each.next_token]), status))
            self._tokens += min(len(kept) + 1, left)
        return [segment for segment in found if segment.text]


class _TextStream:
    """Token ids that become text segment by segment: what a token adds depends on those before it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []  # the last ones
        self.shown = 0  # characters handed out
        self.ends: list[int] = []  # numbers of ids whose text ends with a whole character

    def add(self, ids: Sequence[int]) -> str:
        """The text that these ids add. Half a character waits for its other half."""
        self.ids += ids
        text = self._decode(self.ids)
        whole = text.rstrip("\ufffd")
        added, self.shown = whole[self.shown :], max(self.shown, len(whole))
        if text == whole:
            self.ends.append(len(self.ids))
            if len(self.ids) > _WINDOW:  # to decode all of it each time would take quadratic time
                self._forget()
        return added

    def _forget(self) -> None:
        """Keep the ids that decide how the next ones read, from the beginning of a character: with the second half of
        one before them, byte tokens would not read as text."""
        start = max((end for end in self.ends if end <= len(self.ids) - _CONTEXT), default=0)
        self.ids, self.ends = self.ids[start:], [end - start for end in self.ends if end > start]
        self.shown = len(self._decode(self.ids))

    def instead(self, ids: Sequence[int]) -> str:
        """The text that these ids would add."""
        return self._decode([*self.ids, *ids]).rstrip("\ufffd")[self.shown :] if ids else ""

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return "".join(f"{token} " for token in ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
