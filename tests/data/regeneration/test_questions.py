import pytest

from specdraft.data.regeneration.questions import flaw, normalized


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is a prime number?", ""),
        ("Hello", "fewer than two words"),
        ("?!", "fewer than two words"),
        ("What is \ufffd this", "unreadable"),
        ("Decode " + "QUJD" * 20, "unreadable"),
        ("the cat sat on the mat, the cat sat on the mat, the cat sat on the mat", "repeats itself"),
        ("Compare a cat and a dog, then compare a cat and a bird, in a table of two columns please", ""),
        ("何が 起こり ましたか", ""),
    ],
)
def test_flaws(question: str, expected: str) -> None:
    assert flaw(question) == expected


def test_questions_that_differ_in_case_marks_and_blanks_are_the_same() -> None:
    assert normalized("What  is\nPython?") == normalized("what is python") != normalized("what was python")
