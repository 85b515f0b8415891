"""The tiny target and the conversations of the data's tests."""

from tests.data.conftest import library, target, tokenizer
from tests.data.regeneration.conftest import engine, talks

__all__ = ["engine", "library", "talks", "target", "tokenizer"]
