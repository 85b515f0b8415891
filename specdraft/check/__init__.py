"""What every drafter has to hold, as checks that anyone can run on a drafter of their own.

A check is one function, which says in its docstring what would go wrong in serving. The project's tests call the same
functions."""

from specdraft.check.outcome import Failed, Level, NotApplicable, Outcome
from specdraft.check.subject import Subject
from specdraft.check.suite import CHECKS, run_check, run_checks
from specdraft.check.target import random_target

__all__ = [
    "CHECKS",
    "Failed",
    "Level",
    "NotApplicable",
    "Outcome",
    "Subject",
    "random_target",
    "run_check",
    "run_checks",
]
