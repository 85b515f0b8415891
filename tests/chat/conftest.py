"""A random target with a tokenizer and a chat template: it talks nonsense, and repeats itself enough to be drafted."""

import pytest

from specdraft.chat.conversation import Answer, Conversation
from specdraft.decoding.generation import Generation
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.targets import Target
from tests.fakes import tiny_llama


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 9, 300, 256)


@pytest.fixture(scope="session")
def target(tokenizer):
    return Target.from_model(tiny_llama(300, context=256), tokenizer)


@pytest.fixture
def conversation(target):
    """conversation(options...) -> one whose answers have 24 tokens, drafted by prompt lookup."""

    def make(drafter=None, temperature=0.0, **options) -> Conversation:
        settings = EvaluationSettings(3, temperatures=(temperature,), max_new_tokens=24)
        return Conversation(target, drafter or PromptLookup(), settings, **options)

    return make


@pytest.fixture
def answered():
    """answered(tokens, seconds, accepted, plain=(rounds, seconds)) -> an answer with these counts."""

    def make(tokens, seconds, accepted=(), plain=(0, 0.0)) -> Answer:
        counts = {"drafted": [3] * len(accepted), "accepted": list(accepted)}
        timed = {"decode_seconds": seconds, "plain_rounds": plain[0], "plain_seconds": plain[1]}
        return Answer("q", bool(accepted), Generation([7] * tokens, **counts, **timed))

    return make
