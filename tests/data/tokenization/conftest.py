"""The chat templates of real models."""

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specdraft.data.tokenization.chat import Example

USER = {"role": "user", "content": "def add(left, right):"}


TEMPLATES = Path(__file__).parents[1] / "templates"


ENDS = {  # the end mark of each template's models
    "chatml": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "qwen3": "<|im_end|>",
}


MARKS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>"]

MARKS += ["<|eot_id|>", "[INST]", "[/INST]", "</s>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture(scope="session")
def with_template(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The tokenizer with the marks of all the models, by the name of the template it shall have."""
    marked = copy.deepcopy(tokenizer)
    marked.add_tokens(MARKS, special_tokens=True)

    def choose(name: str) -> PreTrainedTokenizerFast:
        chosen = copy.deepcopy(marked)
        chosen.eos_token = ENDS[name]
        chosen.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        return chosen

    return choose


def spoken(tokenizer: PreTrainedTokenizerFast, example: Example) -> list[str]:
    """The supervised stretches."""
    found, previous = list[list[int]](), False
    for token, learn in zip(example.input_ids, example.loss_mask, strict=True):
        if learn and not previous:
            found.append([])
        if learn:
            found[-1].append(token)
        previous = learn
    return [tokenizer.decode(ids) for ids in found]
