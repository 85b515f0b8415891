"""Prompt lookup against drafts found by hand and against a search through the whole text."""

import random

import pytest

from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError


def draft(drafter, tokens, num_tokens=5):
    return drafter.propose(drafter.start(tokens), num_tokens)


def test_continues_the_earlier_occurrence():
    assert draft(PromptLookup(), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], 4) == [4, 5, 6, 7]


def test_longest_ngram_wins_over_a_more_recent_shorter_one():
    assert draft(PromptLookup(), [1, 2, 3, 9, 3, 8, 1, 2, 3], 1) == [9]


def test_most_recent_occurrence_wins():
    assert draft(PromptLookup(), [1, 2, 8, 1, 2, 9, 1, 2], 1) == [9]


def test_fewer_tokens_at_the_end_of_the_text_and_none_without_a_match():
    assert draft(PromptLookup(), [5, 6, 5], 5) == [6, 5]
    assert draft(PromptLookup(), [4, 4], 5) == [4]
    assert draft(PromptLookup(), [1, 2, 3], 5) == []
    assert draft(PromptLookup(min_ngram=2), [5, 6, 7, 5], 5) == []
    assert draft(PromptLookup(), [1], 5) == []


def brute_force(tokens, num_tokens, max_ngram, min_ngram):
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + num_tokens]
    return []


def test_equals_a_search_through_the_text_however_it_arrives():
    rng = random.Random(0)
    for _ in range(200):
        drafter = PromptLookup(max_ngram=rng.randint(1, 4))
        tokens = [rng.randrange(4) for _ in range(rng.randint(2, 40))]
        state, at = drafter.start(tokens[:1]), 1
        while at < len(tokens):
            piece = tokens[at : at + rng.randint(1, 6)]
            drafter.extend(state, piece)
            at += len(piece)
            assert drafter.propose(state, 3) == brute_force(tokens[:at], 3, drafter.max_ngram, 1)


def test_config_rebuilds_it_and_nothing_trains():
    drafter = PromptLookup(max_ngram=4, min_ngram=2)
    assert PromptLookup(**drafter.config()).config() == drafter.config()
    assert not list(drafter.parameters())
    with pytest.raises(TypeError, match="nothing to train"):
        drafter.training_loss(None, None, None)


@pytest.mark.parametrize("options", [{"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}])
def test_bad_options(options):
    with pytest.raises(UserError, match="expected 1 <= min_ngram <= max_ngram"):
        PromptLookup(**options)
