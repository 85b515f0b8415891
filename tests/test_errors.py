"""One line that any terminal can print, and the exit status of a command."""

import pytest

from specdraft.errors import UserError, check_switch, exit_on_user_error, warn


def test_an_error_is_one_printable_line_of_bounded_length():
    assert str(UserError("a\n   b\n\nc \ud800")) == "a b c \\ud800"
    long = str(UserError("x" * 1000 + "y" * 1000))
    assert len(long) == 1605 and long.startswith("x" * 800 + " ... ") and long.endswith("y" * 800)


def test_a_switch_is_true_or_false():
    check_switch("plan", False)
    for value in ("no", 1, None):
        with pytest.raises(UserError, match=f"plan is {'null' if value is None else value}: expected true or false"):
            check_switch("plan", value)


def test_a_warning_names_no_line_of_ours():
    with pytest.warns(UserWarning, match="three of them") as caught:
        warn("three of them")
    assert (caught[0].filename, caught[0].lineno) == ("specdraft", 0)


def test_an_entry_point_exits_with_2(capsys):
    @exit_on_user_error
    def main(number: int) -> int:
        if number < 0:
            raise UserError("too small")
        return number

    assert main(3) == 3
    with pytest.raises(SystemExit) as status:
        main(-1)
    assert status.value.code == 2 and capsys.readouterr().err == "error: too small\n"
