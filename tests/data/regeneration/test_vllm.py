import sys

import pytest

from specdraft.data.regeneration.vllm import VLLMOffline
from specdraft.errors import UserError


def test_a_missing_vllm_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"generator=vllm needs vLLM, which is not installed"):
        VLLMOffline()
