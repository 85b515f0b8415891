"""TensorRT-LLM: what its LLM API reads. Written to its format and tested against that alone, never run in it.

EAGLE-3 heads and draft models run on its PyTorch backend. Medusa was a method of the TensorRT engine backend alone,
which releases up to 1.2 have and which its main branch dropped in July 2026 (pull requests 15767, 15918 and 16369)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from specdraft.export import eagle3
from specdraft.export.engine import Engine
from specdraft.export.layout import Layout


class TensorRTLLM(Engine):
    """The decoding configurations of TensorRT-LLM's LLM API."""

    name = "tensorrt_llm"
    families: ClassVar[Mapping[str, str]] = {
        "eagle3": "Eagle3DecodingConfig",
        "medusa": "MedusaDecodingConfig",
        "draft_model": "DraftTargetDecodingConfig",
    }
    ignored: ClassVar[frozenset[str]] = frozenset(eagle3.OPTIONS)  # not every 1.x reads or refuses them

    def accept(self, layout: Layout, target: Mapping[str, Any], directory: Path) -> Layout:
        """The layout as it is. Raises UserError as ``Engine`` does, and for a head that reads the last layer's output,
        which nobody is known to have asked it for."""
        layout = super().accept(layout, target, directory)
        if layout.family == "eagle3":
            eagle3.refuse_last_layer(layout, target, "TensorRT-LLM")
        return layout
