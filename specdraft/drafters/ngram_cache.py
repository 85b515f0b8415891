"""N-gram cache: draft the token that followed the last few tokens most often, in this and all earlier requests.

Prompt lookup remembers one occurrence in one text; this counts all of them, in every text since the process began
(training-free; the lookup decoding of llama.cpp). A token is drafted after the longest n-gram that was seen often
enough and went on the same way often enough, and the next one after the n-gram that ends the draft by then."""

from collections import Counter
from collections.abc import Sequence

from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.text_drafter import TextDrafter
from specdraft.errors import UserError


class NgramCache(TextDrafter):
    """Counts of what followed n-grams of ``max_ngram`` down to ``min_ngram`` tokens, of which at most ``capacity`` are
    kept, the newest. A token is drafted that followed at least ``min_count`` times and in at least ``min_share`` of
    all cases."""

    def __init__(
        self,
        max_ngram: int = 4,
        min_ngram: int = 2,
        min_count: int = 1,
        min_share: float = 0.5,
        capacity: int = 1_000_000,
    ) -> None:
        """Raises UserError unless 1 <= min_ngram <= max_ngram, for counts below 1, and for what is no share."""
        arguments = constructor_arguments(locals())
        super().__init__()
        if not 1 <= min_ngram <= max_ngram:
            given = f"min_ngram={min_ngram} and max_ngram={max_ngram}"
            raise UserError(f"an n-gram cache with {given}: expected 1 <= min_ngram <= max_ngram")
        if min_count < 1 or capacity < 1 or not 0 <= min_share <= 1:
            given = f"min_count={min_count}, capacity={capacity} and min_share={min_share}"
            raise UserError(f"an n-gram cache with {given}: expected counts of at least 1 and a share from 0 to 1")
        self._arguments = arguments
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.min_count, self.min_share, self.capacity = min_count, min_share, capacity
        self.forget()

    def forget(self) -> None:
        """Forget all earlier requests."""
        self.followed: dict[tuple[int, ...], Counter[int]] = {}  # the n-gram that was seen first comes first

    def start(self, prompt: list[int]) -> list[int]:
        """The state is the text."""
        text: list[int] = []
        self.extend(text, prompt)
        return text

    def extend(self, state: list[int], tokens: list[int]) -> None:
        """Append the tokens, and count each after the n-grams that end before it."""
        for token in tokens:
            for size in range(self.min_ngram, min(self.max_ngram, len(state)) + 1):
                self.followed.setdefault(tuple(state[-size:]), Counter())[token] += 1
            state.append(token)
        while len(self.followed) > self.capacity:
            del self.followed[next(iter(self.followed))]

    def propose(self, state: list[int], length: int, after: Sequence[int] = ()) -> list[int]:
        """Token after token, until no n-gram says enough."""
        text = [*state[-self.max_ngram :], *after]
        known = len(text)
        while len(text) < known + length and (token := self._next(text)) is not None:
            text.append(token)
        return text[known:]

    def _next(self, text: list[int]) -> int | None:
        """What follows the longest n-gram that says enough; of equals what did so first."""
        for size in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
            counts = self.followed.get(tuple(text[-size:]))
            if counts is None:
                continue
            token, count = max(counts.items(), key=lambda item: item[1])
            if count >= self.min_count and count >= self.min_share * counts.total():
                return token
        return None
