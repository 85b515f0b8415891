"""A tokenizer of Python source."""

import pytest

from specdraft.embedded.tokenizer import train_tokenizer

SOURCE = '''def add(a, b):
    """Add two numbers."""
    total = a + b
    return total
'''


@pytest.fixture(scope="package")
def source() -> str:
    return SOURCE


@pytest.fixture(scope="package")
def tokenizer(source):
    return train_tokenizer([source] * 50, vocab_size=300, context=64)
