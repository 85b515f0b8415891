"""What lookahead decoding keeps of a request, on the host: a window of guesses, and the n-grams that it has made.

W = columns of the window, N = tokens of an n-gram."""

from collections.abc import Iterator, Sequence
from random import Random

Place = tuple[int, int]
"""Row and column of the window."""


class NgramPool:
    """Of every token the ``size`` newest n-grams that begin with it (2402.02057, section 3.2)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._after: dict[int, dict[tuple[int, ...], None]] = {}  # the oldest first

    def add(self, ngram: Sequence[int]) -> None:
        """Keep it as the newest, in place of the oldest where there is no room."""
        first, *rest = ngram
        known = self._after.setdefault(first, {})
        known.pop(tuple(rest), None)
        known[tuple(rest)] = None
        if len(known) > self.size:
            del known[next(iter(known))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed the token, the newest first."""
        return [*reversed(self._after.get(token, {}))]


class Window:
    """``N - 1`` rows of ``W`` tokens, the oldest first: each row is what the target said after the one above it, a pass
    later (section 3.1). Row r, column j stands r + j positions behind the last emitted token, which is the first of row
    0. The window begins with random tokens of the prompt, and is filled up with them; always the same ones, so that
    a request has the same drafts whatever it is decoded beside."""

    def __init__(self, prompt: Sequence[int], last: int, width: int, ngram: int) -> None:
        self.prompt, self.width = prompt, width
        self._random = Random(0)
        self.rows = [self._filled([]) for _ in range(ngram - 1)]
        self.rows[0][0] = last

    def _filled(self, row: list[int]) -> list[int]:
        return row + self._random.choices(self.prompt, k=self.width - len(row))

    def move(self, said: list[int], emitted: Sequence[int]) -> list[tuple[int, ...]]:
        """The target ``said [W]`` this after the newest row, and emitted so many tokens. The window loses its oldest
        row, and moves on with the text. Returns the n-grams that its columns were."""
        rows = [*self.rows, said]
        self.rows = [self._filled(row[len(emitted) - 1 :]) for row in rows[1:]]  # one row below is one position on
        self.rows[0][0] = emitted[-1]
        return list(zip(*rows, strict=True))


def places(width: int, ngram: int) -> Iterator[Place]:
    """All places of a window but the first, the newest row first."""
    for row in reversed(range(ngram - 1)):
        yield from ((row, column) for column in range(0 if row else 1, width))


def sees(one: Place, other: Place) -> bool:
    """Whether a place sees another: those of row 0 up to its own column, and those of its column down to itself."""
    (row, column), (above, beside) = one, other
    return beside <= column if above == 0 else beside == column and above <= row
