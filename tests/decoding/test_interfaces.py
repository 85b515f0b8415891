"""What the decode loop asks for is what targets and drafters have."""

import inspect

import pytest

from specdraft.decoding import interfaces
from specdraft.drafters.base import Drafter
from specdraft.targets import Features, Target


@pytest.mark.parametrize(
    ("wanted", "given"), [(interfaces.Features, Features), (interfaces.Target, Target), (interfaces.Drafter, Drafter)]
)
def test_the_classes_have_what_the_interfaces_name(wanted, given):
    names = [name for name in vars(wanted) if not name.startswith("_")]
    assert names and all(hasattr(given, name) for name in names)
    for name in names:
        if inspect.isfunction(asked := vars(wanted)[name]):
            found = list(inspect.signature(getattr(given, name)).parameters)
            assert found[: len(inspect.signature(asked).parameters)] == list(inspect.signature(asked).parameters)
