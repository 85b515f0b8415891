"""Tokenizing by several processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.data.tokenization.cache import Notes, in_chunks
from specdraft.data.tokenization.chat import Example
from specdraft.data.tokenization.tokenize import Tokenized, accepted, tokenized
from specdraft.errors import UserError

END = 1


def test_only_a_few_chunks_are_under_way(tokenizer: PreTrainedTokenizerFast, library: Path) -> None:
    conversations = PythonStdlib(root=str(library)).conversations("train")
    taken = 0

    def counted() -> Iterator[Any]:
        nonlocal taken
        for _ in range(20):
            for conversation in conversations[:64]:
                taken += 1
                yield conversation

    chunks = tokenized(tokenizer, counted(), [END], 2)
    next(chunks)
    assert taken <= 5 * 64
    assert sum(1 for _ in chunks) == 19


def test_a_killed_process_is_reported(library: Path) -> None:
    class Deadly:
        chat_template = "{{ x }}"

        def get_chat_template(self, tools: Any) -> str:
            import os

            os._exit(9)

    conversations = PythonStdlib(root=str(library)).conversations("train")
    with pytest.raises(UserError, match=r"was killed.*lower data\.num_proc"):
        list(tokenized(Deadly(), conversations, [END], 2))


def test_what_is_noted_when_nothing_is_refused() -> None:
    notes = Notes()
    chunk = next(in_chunks([Example([1], [True])]))
    assert list(accepted([Tokenized(chunk, [])], 0, "conversations", notes)) == [chunk]
    assert notes.counts == {"unsafe": 0}
    assert not notes.warnings
