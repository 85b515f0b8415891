"""How much a text repeats itself: a target that loops makes drafting easy and its acceptance length worthless."""

from collections.abc import Iterable, Sequence


def distinct_ngrams(token_lists: Iterable[Sequence[int]], n: int) -> float:
    """Share of the n-grams of each list that are distinct within it, pooled over the lists; NaN without n-grams.

    Repetition is looked for within a generation, not between them: two answers may well share their idioms.
    """
    distinct = total = 0
    for tokens in token_lists:
        ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
        distinct += len(set(ngrams))
        total += len(ngrams)
    return distinct / total if total else float("nan")
