"""vLLM: the plain layout as it is; all options of the head are served (parity is tested against vLLM 0.32)."""

import json

from specdraft.errors import UserError
from specdraft.export.engine import Engine

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


class VLLM(Engine):
    """vLLM's ``eagle3`` method."""

    name = "vllm"

    def check_target(self, architecture: str) -> None:
        """Raise UserError for targets that vLLM serves, but not with an EAGLE-3 head."""
        if architecture in _WITHOUT_EAGLE3:
            raise UserError(
                f"vLLM cannot serve an EAGLE-3 head for the target architecture {architecture}: expected one that "
                "hands out auxiliary hidden states there, as Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Granite do"
            )

    def usage(self, target: str, directory: str, num_draft_tokens: int, dtype: str) -> str:
        """The server's command line and the same in Python."""
        settings = {"method": "eagle3", "model": directory, "num_speculative_tokens": num_draft_tokens}
        config = json.dumps(settings)
        return (
            f"```bash\nvllm serve {target} --dtype {dtype} --speculative-config '{config}'\n```\n\n"
            f"```python\nfrom vllm import LLM\n\nllm = LLM(model={json.dumps(target)}, dtype={json.dumps(dtype)}, "
            f"speculative_config={config})\n```\n\n"
            "vLLM reports `vllm:spec_decode_num_drafts` and `vllm:spec_decode_num_accepted_tokens`: "
            "acceptance length = 1 + accepted / drafts.\n"
        )
