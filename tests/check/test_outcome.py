"""A line says what came of a check."""

from specdraft.check import Level, Outcome


def test_lines_are_aligned():
    assert Outcome("ranks", Level.FAILED, "no.").line(8) == "FAILED          ranks     no."
    assert Outcome("ranks", Level.NOT_APPLICABLE, "one.").line(8) == "not applicable  ranks     one."
