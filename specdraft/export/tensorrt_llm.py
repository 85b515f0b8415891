"""TensorRT-LLM: what its LLM API reads. Written to its format and tested against that alone, never run in it.

EAGLE-3 heads and draft models run on its PyTorch backend. Medusa was a method of the TensorRT engine backend alone,
which releases up to 1.2 have and which its main branch dropped in July 2026 (pull requests 15767, 15918 and 16369)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from specdraft.errors import UserError
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

    def accept(self, layout: Layout, target: Mapping[str, Any], directory: Path) -> Layout:
        """The layout as it is. Raises UserError for options of EAGLE-3.1, which not every 1.x reads or refuses."""
        layout = super().accept(layout, target, directory)
        if ignored := [option for option in ("fc_norm", "norm_output") if layout.config.get(option)]:
            wrong = f"the head was trained with {' and '.join(ignored)}, which releases of TensorRT-LLM ignore"
            raise UserError(f"{wrong}: expected neither; train with model=eagle3, or choose another engine")
        return layout
