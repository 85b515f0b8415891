"""What a command line names, put together from the inside out."""

import pytest

from specdraft.drafters.cascade import Cascade
from specdraft.drafters.composition import composed
from specdraft.drafters.early_exit import EarlyExit
from specdraft.drafters.ensemble import Ensemble
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.ngram_cache import NgramCache
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.suffix import Suffix
from specdraft.errors import UserError


def test_nothing_is_composed_unless_it_is_asked_for():
    first, second = EarlyExit(), Suffix()
    assert composed([first]) is first and composed([first, second]) is first
    assert composed([first, second], ensemble=False) is first


def test_each_composition():
    first, second, third = EarlyExit(), Suffix(), NgramCache()
    cascade = composed([first, second], inner=third)
    assert isinstance(cascade, Cascade) and (cascade.middle, cascade.inner) == (first, third)
    for beside, members in ((True, [first, second]), (third, [first, second, third])):
        ensemble = composed([first, second], ensemble=beside)
        assert isinstance(ensemble, Ensemble) and ensemble.members == members
    hybrid = composed([first], retrieval=third, min_tokens=4)
    assert isinstance(hybrid, Hybrid) and (hybrid.head, hybrid.retrieval, hybrid.min_tokens) == (first, third, 4)


def test_all_of_them():
    first, second, lookups = EarlyExit(), Suffix(), [PromptLookup(), PromptLookup(), NgramCache()]
    hybrid = composed([first, second], lookups[0], lookups[1], lookups[2])
    assert isinstance(hybrid, Hybrid) and isinstance(hybrid.head, Ensemble)
    cascade, *others = hybrid.head.members
    assert isinstance(cascade, Cascade) and cascade.inner is lookups[0] and others == [second, lookups[1]]
    with pytest.raises(UserError, match="an ensemble with 1 drafter"):
        composed([first], ensemble=True)
