"""Drafts of suffix decoding from this request and from earlier answers, by hand."""

import pytest

from specdraft.drafters.suffix import Suffix
from specdraft.errors import UserError


def answered(drafter, prompt, answer):
    state = drafter.start(prompt)
    drafter.extend(state, answer)
    return state


def test_drafts_come_from_the_text_itself_prompt_and_answer():
    drafter = Suffix(max_cached_requests=0)
    assert drafter.propose(answered(drafter, [1, 2, 3, 4, 5, 1], [2]), 5) == [3, 4]  # as many as matched
    assert drafter.propose(answered(drafter, [1, 2, 3, 4, 5, 1, 2], [3]), 5) == [4, 5, 1]
    assert drafter.propose(answered(drafter, [1, 2, 3, 4, 5, 1, 2], [3]), 1) == [4]
    assert drafter.propose(answered(drafter, [1, 2], [3]), 5) == []
    assert drafter.propose(drafter.start([7]), 5) == []


def test_drafts_come_from_earlier_answers_but_not_from_their_prompts():
    drafter = Suffix()
    answered(drafter, [1, 2, 3, 4, 5], [20, 21, 22, 23, 24])
    assert drafter.propose(answered(drafter, [50, 51], [20, 21]), 5) == [22, 23]
    assert drafter.propose(answered(drafter, [60, 20, 21], [22]), 5) == [23, 24]  # a match may lie in the prompt
    assert drafter.propose(answered(drafter, [60, 2], [3]), 5) == []
    drafter.forget()
    assert drafter.propose(answered(drafter, [60, 21], [22]), 5) == []


def test_requests_side_by_side_know_each_other():
    drafter = Suffix()
    one, other = drafter.start([1]), drafter.start([2])
    for token in (7, 8, 9, 10):
        drafter.extend(one, [token])
    drafter.extend(other, [7, 8])
    assert drafter.propose(other, 5) == [9, 10]
    drafter.extend(one, [11])
    drafter.extend(other, [9, 10])
    assert drafter.propose(other, 5) == [11]


def test_of_two_trees_the_better_draft_wins_and_the_oldest_answers_go():
    drafter = Suffix(max_cached_requests=2)
    answered(drafter, [0], [5, 6, 7, 8])
    again = answered(drafter, [3, 4, 5, 6, 1, 3, 4], [5, 6])  # its own text: 1; the earlier answer: 7, 8
    assert drafter.propose(again, 5) == [1, 3, 4, 5]  # four tokens matched, where the other has two
    newer = answered(drafter, [2], [9, 8])  # the first answer goes
    assert list(drafter.kept) == [again.answer, newer.answer]
    assert drafter.propose(answered(drafter, [3, 5, 6], [7]), 5) == []
    drafter.extend(again, [30, 31, 30])  # it has gone by now, and goes on by itself
    assert drafter.propose(again, 5) == [31]
    assert drafter.propose(answered(drafter, [1, 30], [31]), 5) == []


def test_config_rebuilds_it():
    drafter = Suffix(max_tree_depth=9, min_token_prob=0.3)
    assert Suffix(**drafter.config()).config() == drafter.config()


BAD = [{"max_tree_depth": 1}, {"max_cached_requests": -1}, {"max_spec_factor": 0}, {"min_token_prob": 1.5}]


@pytest.mark.parametrize("options", BAD, ids=str)
def test_bad_options(options):
    with pytest.raises(UserError, match=f"{next(iter(options))}=.*: expected"):
        Suffix(**options)
