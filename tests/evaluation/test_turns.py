"""Conversations side by side: every question once, in the order of its own conversation."""

import pytest

from specdraft.data.prompts import Prompt
from specdraft.evaluation.turns import side_by_side


def prompt(name, *follow_ups):
    return Prompt(name, "any", ({"role": "user", "content": name},), follow_ups, f"{name}:1")


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [
        (1, [["a"], ["a2"], ["a3"], ["b"], ["c"], ["c2"]]),
        (2, [["a", "b"], ["a2"], ["a3"], ["c"], ["c2"]]),
        (9, [["a", "b", "c"], ["a2", "c2"], ["a3"]]),
    ],
)
def test_turns_are_asked_together(batch_size, expected):
    seen, numbers = [], []
    for asked in side_by_side([prompt("a", "a2", "a3"), prompt("b"), prompt("c", "c2")], batch_size):
        seen.append([talk.messages[-1]["content"] for talk in asked])
        numbers += [talk.number for talk in asked]
        for talk in asked:
            assert len(talk.messages) == 1 + 2 * talk.turn
            talk.answered(f"of {talk.messages[-1]['content']}")
    assert seen == expected
    assert sorted(numbers) == [*range(6)]  # of each question the same one, whatever lies beside it


def test_answers_stand_before_what_follows_them():
    for (talk,) in side_by_side([prompt("a", "a2")], 1):
        talk.answered("first" if talk.turn == 0 else "second")
    assert [message["content"] for message in talk.messages] == ["a", "first", "a2"]
