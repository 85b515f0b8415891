"""The n-gram cache against counts over whole texts, and its limits by hand."""

import random
from collections import Counter

import pytest

from specdraft.drafters.ngram_cache import NgramCache
from specdraft.errors import UserError


def test_what_followed_most_often_in_all_requests():
    drafter = NgramCache(max_ngram=2, min_ngram=1)
    drafter.start([1, 2, 3, 1, 2, 4, 1, 2, 4])
    state = drafter.start([9, 1])
    drafter.extend(state, [2])
    assert drafter.propose(state, 3) == [4, 1, 2] and drafter.propose(state, 1) == [4]
    assert state == [9, 1, 2]
    drafter.forget()
    assert drafter.propose(state, 3) == []


def test_a_token_needs_a_count_and_a_share_and_the_longest_ngram_that_has_both_decides():
    texts = [[1, 2, 3], [5, 2, 4], [6, 2, 4]]
    drafters = {
        name: NgramCache(max_ngram=2, min_ngram=1, **options)
        for name, options in {"": {}, "count": {"min_count": 2}, "share": {"min_share": 0.7}}.items()
    }
    for drafter in drafters.values():
        for text in texts:
            drafter.start(text)
    assert drafters[""].propose([1, 2], 1) == [3]
    assert drafters["count"].propose([1, 2], 1) == [4]  # after 1, 2 there came 3 but once; after 2, 4 twice
    assert drafters["share"].propose([7, 2], 1) == []  # 4 in two of three cases


@pytest.mark.parametrize("least", [0.0, 0.6])
def test_equals_counts_over_all_texts(least):
    rng = random.Random(1)
    drafter, texts, drafted = NgramCache(3, 1, min_share=least), [], 0
    for _ in range(20):
        texts.append([rng.randrange(5) for _ in range(rng.randint(3, 12))])
        state = drafter.start(texts[-1][:2])
        drafter.extend(state, texts[-1][2:])
        found, draft = drafter.propose(state, 4), []
        while len(draft) < 4:
            ends = [*state, *draft]
            for size in range(3, 0, -1):
                after = Counter(
                    text[i + size]
                    for text in texts
                    for i in range(len(text) - size)
                    if text[i : i + size] == ends[-size:]
                )
                most = max(after.values(), default=0)
                if most and most >= least * after.total():
                    break
            else:
                break
            if list(after.values()).count(most) > 1:  # a tie
                break
            draft.append(after.most_common(1)[0][0])
        assert found[: len(draft)] == draft
        drafted += len(draft)
    assert drafted > 20


def test_the_oldest_ngrams_go():
    drafter = NgramCache(max_ngram=1, min_ngram=1, capacity=3)
    drafter.start([1, 2, 3, 4, 5])
    assert list(drafter.followed) == [(2,), (3,), (4,)]


def test_config_rebuilds_it():
    drafter = NgramCache(max_ngram=5, capacity=7)
    assert NgramCache(**drafter.config()).config() == drafter.config()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_ngram": 0}, "expected 1 <= min_ngram <= max_ngram"),
        ({"min_count": 0}, "counts of at least 1"),
        ({"min_share": 2.0}, "a share from 0 to 1"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(UserError, match=said):
        NgramCache(**options)
