from typing import Any

import pytest

from specdraft.data.regeneration.request import RegenerationSettings
from specdraft.decoding.sampling import Sampling
from specdraft.errors import UserError
from specdraft.targets import Target


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": (-1.0,)}, r"data\.temperatures is \[-1\.0\]"),
        ({"temperatures": ("hot",)}, r"data\.temperatures is \['hot'\]: .* or among them served"),
        ({"max_new_tokens": 0}, "max_new_tokens of regeneration is 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RegenerationSettings(**settings)


def test_conversations_take_turns_at_how_they_are_sampled(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.model.generation_config, "top_k", 20)
    settings = RegenerationSettings(temperatures=(0.0, "served"))
    assert [settings.sampling(target, number) for number in range(3)] == [Sampling(), Sampling(1.0, 20), Sampling()]
