"""A small tokenizer with a chat template, and generations without a model."""

from dataclasses import dataclass

import pytest

from specdraft.embedded.tokenizer import train_tokenizer


@dataclass
class FakeGeneration:
    tokens: list[int]
    drafted: list[int]
    accepted: list[int]
    prefill_seconds: float = 0.0
    decode_seconds: float = 1.0
    draft_seconds: float = 0.0


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 128)


@pytest.fixture
def generation():
    return FakeGeneration
