"""The corpus keeps to its split, and its sequences to their weights."""

import random

from specdraft.data.sources import stdlib
from specdraft.data.sources.base import SPLITS
from specdraft.embedded.corpus import LENGTH, documents, sequences


def test_documents_keep_to_their_split(tokenizer, source, monkeypatch):
    paths = [f"module_{index}.py" for index in range(60)] + ["test/test_all.py"]
    monkeypatch.setattr(stdlib, "files", lambda: paths)
    monkeypatch.setattr(stdlib, "read", lambda path: f"# {path}\n{source}")
    for split in SPLITS:
        kinds = documents(tokenizer, split)
        expected = [path for path in paths if stdlib.split_of(path) == split]
        texts = [tokenizer.decode(ids) for ids in kinds["library"] + kinds["tests"]]
        assert sorted(texts) == sorted(f"<|begin|># {path}\n{source}" for path in expected)
        assert len(kinds["chat"]) == len(expected)


def test_sequences_hold_whole_repeats_and_a_sample(monkeypatch):
    kinds = {"library": [[1] * LENGTH] * 4, "chat": [[2] * LENGTH] * 4}
    made = sequences(kinds, {"library": 1.5, "chat": 2.0}, random.Random(0))
    assert len(made) == 6 + 8 and all(len(sequence) == LENGTH for sequence in made)
    assert sum(sequence[0] == 1 for sequence in made) == 6
