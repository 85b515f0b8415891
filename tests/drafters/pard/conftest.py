"""Small parallel drafts in fp64, unlike their targets everywhere."""

import pytest

from specdraft.drafters.pard import Pard
from specdraft.targets import Target
from tests.drafters.drafts import noisy
from tests.families import FAMILIES


@pytest.fixture
def build():
    """build("llama", **options) -> a draft of four tokens for a target of that family."""

    def make(family: str = "llama", **options) -> Pard:
        target = Target.from_model(FAMILIES[family].build())
        return noisy(Pard.for_target(target, **{"mask_token": 5, "num_drafts": 4, "copy_layers": [1, 2], **options}))

    return make
