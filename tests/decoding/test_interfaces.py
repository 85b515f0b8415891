"""What the decode loop asks for is what targets and drafters have."""

import inspect

import pytest

from specdraft.decoding import interfaces
from specdraft.drafters.base import Drafter
from specdraft.drafters.draft_model import DraftModelDrafting
from specdraft.drafters.drafting import LevelDrafting, OneByOne
from specdraft.drafters.eagle.drafting import EagleDrafting
from specdraft.drafters.heads import HeadsDrafting
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


@pytest.mark.parametrize("given", [LevelDrafting, OneByOne, EagleDrafting, HeadsDrafting, DraftModelDrafting])
def test_what_drafts_for_requests_side_by_side_takes_what_the_loop_gives(given):
    assert issubclass(given, interfaces.Drafting)
    names = interfaces.Drafting.__abstractmethods__
    assert names == {"begin", "advance", "draft", "drop"}
    for name in names:
        asked = list(inspect.signature(getattr(interfaces.Drafting, name)).parameters)
        assert list(inspect.signature(getattr(given, name)).parameters) == asked
