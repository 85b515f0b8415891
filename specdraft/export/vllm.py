"""vLLM: the plain layout as it is; all options of the head are served (parity is tested against vLLM 0.32)."""

import json

from specdraft.export.engine import Engine


class VLLM(Engine):
    """vLLM's ``eagle3`` method."""

    name = "vllm"

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
