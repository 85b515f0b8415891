"""All checks together: names, what breaks, and drafters that hold everything."""

import pytest
import torch

from specdraft.check import CHECKS, Level, Subject, run_check, run_checks
from specdraft.check.suite import chosen
from specdraft.errors import UserError
from tests.check.mine import outcome, subject, target


def test_the_drafter_of_the_page_holds_all():
    found = {each.name: each for each in run_checks(subject())}
    assert list(found) == list(CHECKS)
    assert {name: each for name, each in found.items() if each.level is Level.FAILED} == {}
    assert [name for name, each in found.items() if each.level is Level.NOT_APPLICABLE] == ["totals"]


def test_every_check_says_what_goes_wrong_in_serving():
    assert all(len(" ".join((check.__doc__ or "").split())) > 100 for check in CHECKS.values())


def test_what_raises_says_so_in_one_line_and_the_others_go_on():
    change = ('state["last"] = tokens[-1:]', 'raise KeyError("no\\nfeature")')
    found = outcome("rounds", change)
    assert found.level is Level.FAILED and "\n" not in found.sentence
    assert found.sentence.startswith("could not run: KeyError: ") and "(rolling.py, line " in found.sentence
    assert outcome("gradients", change).level is Level.PASSED
    found = run_check("gradients", Subject(lambda **_: 1 / 0, target(), torch.arange(32)))
    assert found.sentence.startswith("could not run: ZeroDivisionError: division by zero (test_suite.py, line ")


def test_some_checks_are_chosen_by_name():
    assert chosen(["gradients", "future"]) == ["future", "gradients"] and chosen(None) == list(CHECKS)
    with pytest.raises(UserError, match="checks names 'gradient': expected some of trained_is_served, "):
        chosen(["gradient"])
    assert [each.name for each in run_checks(subject(), ["future"])] == ["future"]
