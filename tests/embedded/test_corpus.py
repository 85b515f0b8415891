"""The corpus keeps to its split and weighs its kinds."""

import random

from specdraft.data.sources import stdlib
from specdraft.data.sources.base import SPLITS
from specdraft.embedded.corpus import SEQUENCE_LENGTH, documents, sequences
from specdraft.embedded.tokenizer import train_tokenizer
from tests.embedded.common import SOURCE


def test_documents_keep_to_their_split(monkeypatch):
    tokenizer = train_tokenizer([SOURCE] * 50, vocab_size=300, context=64)
    paths = [f"module_{index}.py" for index in range(60)] + ["test/test_all.py"]
    monkeypatch.setattr(stdlib, "files", lambda: paths)
    monkeypatch.setattr(stdlib, "read", lambda path: f"# {path}\n{SOURCE}")
    for split in SPLITS:
        kinds = documents(tokenizer, split)
        expected = [path for path in paths if stdlib.split_of(path) == split]
        texts = [tokenizer.decode(ids) for ids in kinds["library"] + kinds["tests"]]
        assert sorted(texts) == sorted(f"<|begin|># {path}\n{SOURCE}" for path in expected)
        assert len(kinds["chat"]) == len(expected)


def test_sequences_hold_whole_repeats_and_a_sample():
    kinds = {"library": [[1] * SEQUENCE_LENGTH] * 4, "chat": [[2] * SEQUENCE_LENGTH] * 4}
    made = sequences(kinds, {"library": 1.5, "chat": 2.0}, random.Random(0))
    assert len(made) == 6 + 8 and all(len(sequence) == SEQUENCE_LENGTH for sequence in made)
    assert sum(sequence[0] == 1 for sequence in made) == 6


def test_long_documents_are_cut_and_short_ones_joined():
    kinds = {"library": [list(range(SEQUENCE_LENGTH * 2 + 10)), [7] * (SEQUENCE_LENGTH - 11)]}
    made = sequences(kinds, {"library": 1.0}, random.Random(0))
    assert len(made) == 2 and all(len(sequence) == SEQUENCE_LENGTH for sequence in made)  # one token is left over
