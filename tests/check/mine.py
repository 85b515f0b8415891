"""The drafter `rolling` of docs/add-a-drafter.md, whole or with a mistake written into it, beside a random target."""

import functools
import re
import sys
import types
from pathlib import Path

import torch

from specdraft.check import Level, Outcome, Subject, random_target, run_check

PAGE = Path(__file__).parents[2] / "docs" / "add-a-drafter.md"
SOURCE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
OPTIONS = {"width": 48}


@functools.cache
def target():
    return random_target()


def rolling(*changes: tuple[str, str]) -> types.ModuleType:
    """The page's module, in which of each change the first text stands no more, but the second."""
    source = SOURCE
    for before, after in changes:
        assert before in source, f"the page has no {before!r}"
        source = source.replace(before, after)
    module = types.ModuleType("drafter_of_the_page")  # a name that nobody else imports
    exec(compile(source, "rolling.py", "exec"), module.__dict__)
    sys.modules[module.__name__] = module  # a checkpoint names its class
    return module


def subject(*changes: tuple[str, str], beside=None, samples: int = 300) -> Subject:
    beside = beside or target()
    make = functools.partial(rolling(*changes).Rolling.for_target, **OPTIONS)
    return Subject(make, beside, torch.arange(beside.vocab_size), samples=samples)


def outcome(check: str, *changes: tuple[str, str], **options) -> Outcome:
    """What a check says of the drafter with these mistakes."""
    return run_check(check, subject(*changes, **options))


@functools.cache
def sound(check: str, **options) -> Outcome:
    """Of the drafter as it stands on the page."""
    return outcome(check, **options)


def failure(check: str, *changes: tuple[str, str], **options) -> str:
    """What it says of one that must not pass, while it passes the drafter as it stands on the page."""
    assert sound(check, **{k: v for k, v in options.items() if k == "samples"}).level is Level.PASSED
    found = outcome(check, *changes, **options)
    assert found.level is Level.FAILED, found
    return found.sentence
