"""TensorRT-LLM: what its LLM API reads. Written to its format and tested against that alone, never run in it.

EAGLE-3 heads and draft models run on its PyTorch backend. Medusa was a method of the TensorRT engine backend alone,
which releases up to 1.2 have and which its main branch dropped in July 2026 (pull requests 15767, 15918 and 16369)."""

from collections.abc import Mapping
from typing import ClassVar

from specdraft.export.eagle3 import OPTIONS
from specdraft.export.engine import Engine


class TensorRTLLM(Engine):
    """The decoding configurations of TensorRT-LLM's LLM API."""

    name = "tensorrt_llm"
    families: ClassVar[Mapping[str, str]] = {
        "eagle3": "Eagle3DecodingConfig",
        "medusa": "MedusaDecodingConfig",
        "draft_model": "DraftTargetDecodingConfig",
    }
    ignored: ClassVar[frozenset[str]] = frozenset(OPTIONS)  # not every 1.x reads or refuses them
