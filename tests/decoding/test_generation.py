"""Where an answer ends."""

from specdraft.decoding.generation import truncate


def test_an_answer_ends_at_its_limit_or_with_its_first_end_of_text():
    assert truncate([5, 6, 7, 8], 3, frozenset()) == [5, 6, 7]
    assert truncate([5, 6, 7, 8], 3, frozenset({6, 7})) == [5, 6]
    assert truncate([5, 6, 7, 8], 3, frozenset({8})) == [5, 6, 7]
    assert truncate([], 3, frozenset({8})) == []
