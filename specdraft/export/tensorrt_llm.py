"""TensorRT-LLM: what its LLM API reads. Written to its format and tested against that alone, never run in it.

EAGLE-3 heads and draft models run on its PyTorch backend. Medusa was a method of the TensorRT engine backend alone,
which releases up to 1.2 have and which its main branch dropped in July 2026 (pull requests 15767, 15918 and 16369).
"""

import json
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
        ignored = [option for option in ("fc_norm", "norm_output") if layout.config.get(option)]
        if ignored:
            raise UserError(
                f"the head was trained with {' and '.join(ignored)}, which releases of TensorRT-LLM ignore: expected "
                "an EAGLE-3 head without; train with model=eagle3, or choose another engine"
            )
        return layout

    def usage(self, layout: Layout, target: str, directory: str, num_draft_tokens: int) -> str:
        """The program."""
        decoding = self.families[layout.family]
        options: dict[str, str] = {"max_draft_len": str(num_draft_tokens), "speculative_model": json.dumps(directory)}
        module = "tensorrt_llm"
        note = "Releases before 1.2 call `speculative_model` `speculative_model_dir`. "
        if layout.family == "eagle3":
            layers = ", ".join(str(k - 1) for k in layout.config["eagle_aux_hidden_state_layer_ids"])
            options |= {"eagle3_one_model": "True", "eagle3_layers_to_capture": f"{{{layers}}}"}
            note += (
                "`eagle3_layers_to_capture` counts layers from 0, one less than in config.json, and is read from no "
                "file: with other numbers the head is hardly ever accepted. "
            )
        elif layout.family == "medusa":
            module = "tensorrt_llm._tensorrt_engine"  # the PyTorch backend has no Medusa
            note = (
                "**Releases up to 1.2 only**: Medusa needs the TensorRT engine backend, which TensorRT-LLM removed in "
                "July 2026; later versions load no Medusa heads. vLLM does (`engine=vllm`). "
            )
            chain = [[0] * depth for depth in range(1, num_draft_tokens + 1)]
            options |= {"num_medusa_heads": str(layout.config["medusa_num_heads"]), "medusa_choices": json.dumps(chain)}
        arguments = ", ".join(f"{name}={value}" for name, value in options.items())
        return (
            f"```python\nfrom {module} import LLM\nfrom tensorrt_llm.llmapi import {decoding}\n\n"
            f"llm = LLM(model={json.dumps(target)}, dtype={json.dumps(layout.dtype)},\n"
            f"          speculative_config={decoding}({arguments}))\n```\n\n{note}"
            "Above temperature 0 drafts are the most likely tokens all the same. The files follow the format that "
            "TensorRT-LLM 1.2 reads, but were never run in it: compare its acceptance with the table before relying on "
            "it.\n"
        )
