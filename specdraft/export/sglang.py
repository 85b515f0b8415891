"""SGLang reads the files that vLLM reads, with one exception. Written to its format, not yet run in it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from specdraft.export import eagle3
from specdraft.export.engine import Engine
from specdraft.export.layout import DTYPES, Layout


class SGLang(Engine):
    """SGLang's algorithms, as chains. It has none for Medusa heads. It drafts greedily unless told otherwise."""

    name = "sglang"
    families: ClassVar[Mapping[str, str]] = {"eagle3": "EAGLE3", "eagle": "EAGLE", "draft_model": "STANDALONE"}
    # Its EAGLE-3 class passes over flags and tensors that it has no place for, and takes the target's embedding.
    ignored: ClassVar[frozenset[str]] = frozenset(
        ("norm_before_residual", "qk_norm", "attention_bias", "sliding_window", "own_embedding")
    )

    def accept(self, layout: Layout, target: Mapping[str, Any], directory: Path) -> Layout:
        """As it is, except for EAGLE-1: SGLang has its own name for it, and a bias that stays random if left out.
        Raises UserError for a head that reads the last layer's output, as SGLang captures what goes into layers."""
        layout = super().accept(layout, target, directory)
        if layout.family == "eagle3":
            eagle3.refuse_last_layer(layout, target, "SGLang")
        if layout.family != "eagle":
            return layout
        config = layout.config | {"architectures": ["LlamaForCausalLMEagle"]}
        bias = torch.zeros(config["hidden_size"], dtype=DTYPES[layout.dtype])
        return replace(layout, config=config, tensors=layout.tensors | {"fc.bias": bias})
