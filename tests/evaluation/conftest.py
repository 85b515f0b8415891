"""A small tokenizer with a chat template, and generations without a model."""

import pytest

from specdraft.decoding.generation import Generation
from specdraft.embedded.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 128)


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
