"""vLLM serves every family, each as a chain of drafts (parity is tested against vLLM 0.32)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from specdraft.errors import UserError
from specdraft.export.engine import GREEDY, SAMPLED, Engine
from specdraft.export.layout import Layout

# Targets that specdraft can train for, whose classes in vLLM 0.32 do not hand out auxiliary hidden states.
_WITHOUT_EAGLE3 = {
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Exaone4ForCausalLM",
    "FalconForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteMoeForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "StableLmForCausalLM",
}

# Parts of a path from which vLLM concludes a method of its own, whatever the configuration says.
_TELLING = ("eagle-", "eagle3", "dflash", "dspark")


# In vLLM's speculative configuration; Medusa's heads are not sampled whatever it says.
SAMPLED_DRAFTS = {"draft_sample_method": "probabilistic"}


class VLLM(Engine):
    """vLLM's methods, named as the families are. It drafts greedily unless told otherwise."""

    name = "vllm"
    families: ClassVar[Mapping[str, str]] = {family: family for family in ("eagle3", "eagle", "medusa", "draft_model")}

    def accept(self, layout: Layout, target: Mapping[str, Any], directory: Path) -> Layout:
        """The layout as it is.

        Raises UserError for targets that vLLM serves, but not with an EAGLE-3 head, and for a directory whose name
        would make vLLM load the drafter as something else.
        """
        layout = super().accept(layout, target, directory)
        architecture = target.get("architecture")
        if layout.family == "eagle3" and architecture in _WITHOUT_EAGLE3:
            raise UserError(
                f"vLLM cannot serve an EAGLE-3 head for the target architecture {architecture}: expected one that "
                "hands out auxiliary hidden states there, as Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Granite do"
            )
        telling = [part for part in _TELLING if part in str(directory.resolve()).lower()]
        if layout.family in ("medusa", "draft_model") and telling:
            raise UserError(
                f"the path {directory.resolve()} contains {telling[0]!r}, for which vLLM would load the "
                f"{layout.title} by another method: expected none of {', '.join(_TELLING)} in it; choose with output="
            )
        return layout

    @classmethod
    def flags(cls, family: str, directory: str, num_draft_tokens: int, drafting: str = GREEDY) -> str | None:
        """The speculative configuration as JSON; None for a family that vLLM does not draft so."""
        if family not in cls.families or (drafting == SAMPLED and family == "medusa"):
            return None
        config = {"method": cls.families[family], "model": directory, "num_speculative_tokens": num_draft_tokens}
        return json.dumps(config | (SAMPLED_DRAFTS if drafting == SAMPLED else {}))

    def usage(self, layout: Layout, target: str, directory: str, num_draft_tokens: int) -> str:
        """The server's command line and the same in Python."""
        config = self.flags(layout.family, directory, num_draft_tokens)
        drafting = (
            "vLLM drafts no trees and samples no Medusa heads: it runs the most likely token of each, as a chain, at "
            "every temperature.\n"
            if layout.family == "medusa"
            else "Above temperature 0 vLLM drafts the most likely tokens all the same; with "
            f"`{json.dumps(SAMPLED_DRAFTS)[1:-1]}` in the configuration it samples its drafts.\n"
        )
        return (
            f"```bash\nvllm serve {target} --dtype {layout.dtype} --speculative-config '{config}'\n```\n\n"
            f"```python\nfrom vllm import LLM\n\nllm = LLM(model={json.dumps(target)}, "
            f"dtype={json.dumps(layout.dtype)}, speculative_config={config})\n```\n\n"
            "vLLM reports `vllm:spec_decode_num_drafts` and `vllm:spec_decode_num_accepted_tokens`: "
            f"acceptance length = 1 + accepted / drafts.\n\n{drafting}"
        )
