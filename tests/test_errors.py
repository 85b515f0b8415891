"""An error that a person can act on is one printable line."""

import warnings

import pytest

from specdraft.errors import UserError, exit_on_user_error, warn


def test_a_message_is_one_printable_line_of_bounded_length():
    assert str(UserError(" one\n\n  two \r\nthree\n")) == "one two three"
    assert str(UserError("half \ud83d a character")) == "half \\ud83d a character"
    long = str(UserError("a" * 1000 + "b" * 1000))
    assert len(long) < 1700 and long.startswith("aaa") and long.endswith("bbb") and " ... " in long


def test_entry_points_print_it_and_exit_with_2(capsys):
    @exit_on_user_error
    def main(fail):
        if fail:
            raise UserError("x is 1: expected 2")
        return "done"

    assert main(False) == "done"
    with pytest.raises(SystemExit) as ended:
        main(True)
    assert ended.value.code == 2 and capsys.readouterr().err == "error: x is 1: expected 2\n"


def test_a_warning_shows_no_line_of_ours():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("this is slow")
    assert [(str(each.message), each.filename) for each in caught] == [("this is slow", "specdraft")]
