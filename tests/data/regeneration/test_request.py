from typing import Any

import pytest

from specdraft.data.regeneration.request import RegenerationSettings
from specdraft.errors import UserError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": (-1.0,)}, r"data\.temperatures is \[-1\.0\]"),
        ({"max_new_tokens": 0}, "max_new_tokens of regeneration is 0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RegenerationSettings(**settings)
