"""SGLang reads the files that vLLM reads, with one exception. Written to its format, not yet run in it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from specdraft.export.engine import Engine
from specdraft.export.layout import DTYPES, Layout


class SGLang(Engine):
    """SGLang's algorithms, as chains. It has none for Medusa heads. It drafts greedily unless told otherwise."""

    name = "sglang"
    families: ClassVar[Mapping[str, str]] = {"eagle3": "EAGLE3", "eagle": "EAGLE", "draft_model": "STANDALONE"}

    def accept(self, layout: Layout, target: Mapping[str, Any], directory: Path) -> Layout:
        """As it is, except for EAGLE-1: SGLang has its own name for it, and a bias that stays random if left out."""
        layout = super().accept(layout, target, directory)
        if layout.family != "eagle":
            return layout
        bias = torch.zeros(layout.config["hidden_size"], dtype=DTYPES[layout.dtype])
        return replace(
            layout,
            config=layout.config | {"architectures": ["LlamaForCausalLMEagle"]},
            tensors=layout.tensors | {"fc.bias": bias},
        )

    def usage(self, layout: Layout, target: str, directory: str, num_draft_tokens: int) -> str:
        """The server's command line."""
        whole = layout.config.get("draft_vocab_size") in (None, layout.config.get("vocab_size"))
        sampled = (
            "`--speculative-use-rejection-sampling` samples its drafts"
            if whole and layout.family != "draft_model"
            else "its option for sampled drafts (`--speculative-use-rejection-sampling`) is for EAGLE heads with the "
            "whole vocabulary"
        )
        return (
            f"```bash\npython -m sglang.launch_server --model-path {target} --dtype {layout.dtype} "
            f"--speculative-algorithm {self.families[layout.family]} --speculative-draft-model-path {directory} "
            f"--speculative-num-steps {num_draft_tokens} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {num_draft_tokens + 1}\n```\n\n"
            "The files follow the format that SGLang 0.5.23 reads. specdraft's own parity test runs vLLM only; "
            "compare the server's acceptance with the table before relying on it.\n\n"
            f"Above temperature 0 SGLang drafts the most likely tokens all the same; {sampled}.\n"
        )
