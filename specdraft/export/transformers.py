"""transformers' own assisted generation takes draft models; it has no place for heads."""

import json
from collections.abc import Mapping
from typing import ClassVar

from specdraft.export.engine import SAMPLED, Engine
from specdraft.export.layout import Layout


class Transformers(Engine):
    """``generate(assistant_model=...)``."""

    name = "transformers"
    families: ClassVar[Mapping[str, str]] = {"draft_model": "assistant_model"}
    drafting: ClassVar[str] = SAMPLED

    def usage(self, layout: Layout, target: str, directory: str, num_draft_tokens: int) -> str:
        """The program."""
        dtype = json.dumps(layout.dtype)
        return (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(target)})\n"
            f"target = AutoModelForCausalLM.from_pretrained({json.dumps(target)}, dtype={dtype})\n"
            f"draft = AutoModelForCausalLM.from_pretrained({json.dumps(directory)}, dtype={dtype})\n"
            f"draft.generation_config.num_assistant_tokens = {num_draft_tokens}\n"
            'draft.generation_config.num_assistant_tokens_schedule = "constant"\n'
            "draft.generation_config.assistant_confidence_threshold = 0.0  # always draft that many\n"
            'inputs = tokenizer("def main():", return_tensors="pt")\n'
            "print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, max_new_tokens=64)[0]))\n```\n\n"
            "With `do_sample=True` the draft model samples, too.\n"
        )
