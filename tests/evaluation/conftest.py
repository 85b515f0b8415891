"""A small tokenizer with a chat template, a random target with it, prompts, and generations without a model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.decoding.generation import Generation
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.evaluation import EvaluationSettings, Prompt
from specdraft.targets import Target

SETTINGS = EvaluationSettings(num_draft_tokens=3, temperatures=(0.0, 1.0), max_new_tokens=24, seed=3)


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 128)


@pytest.fixture(scope="module")
def target(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Target.from_model(LlamaForCausalLM(config), tokenizer)


@pytest.fixture(scope="module")
def prompts():
    def prompt(text, category, *follow_ups):
        return Prompt(text, category, ({"role": "user", "content": text},), follow_ups, f"{text}:1")

    return [
        prompt("def a", "code"),
        prompt("return", "code"),
        prompt("Hello", "chat", "and then?"),
        prompt("x", "chat"),
    ]


@pytest.fixture
def generation():
    """``Generation(tokens, drafted, accepted, prefill, decode, draft seconds)`` of chains."""

    def build(tokens, drafted, accepted, prefill_seconds=0.0, decode_seconds=1.0, draft_seconds=0.0):
        return Generation(
            tokens,
            drafted,
            accepted,
            nodes=drafted,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            draft_seconds=draft_seconds,
        )

    return build
