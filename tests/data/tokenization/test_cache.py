"""Tokenized examples on disk: found again, whole, or made again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdraft.data.tokenization.cache import Examples, Flat, Notes, cached_examples, in_chunks
from specdraft.data.tokenization.chat import Example
from specdraft.errors import UserError


def some(folder: Path, decisive: Any = 0, given: list[Example] | None = None) -> Examples:
    made = [Example([5, 6, 7], [False, True, True]), Example([8], [False]), Example([9, 1], [True, True])]
    return cached_examples(folder, decisive, 10, lambda notes: in_chunks(made if given is None else given, 2))


def test_examples_come_back_from_disk(tmp_path: Path) -> None:
    first = some(tmp_path)
    assert first.flat.tokens.tolist() == [5, ~6, ~7, 8, ~9, ~1]
    assert first.flat.lengths.tolist() == [3, 1, 2]
    assert first.flat.supervised.tolist() == [2, 0, 2]
    assert first.counts.tolist() == [0, 1, 0, 0, 0, 0, 1, 1, 0, 1]

    def fail(notes: Notes) -> Iterator[Flat]:
        raise AssertionError("what is there is not made again")

    again = cached_examples(tmp_path, 0, 10, fail)
    assert np.array_equal(again.flat.tokens, first.flat.tokens)
    assert again.fingerprint == first.fingerprint
    with pytest.raises(AssertionError):
        cached_examples(tmp_path, 1, 10, fail)
    assert len(some(tmp_path, 2, []).flat.lengths) == 0


@pytest.mark.parametrize("name", ["tokens.bin", "lengths.npy", "counts.npy", "index.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damaged_examples_are_named_and_made_anew(tmp_path: Path, name: str, damage: str) -> None:
    tokens = some(tmp_path).flat.tokens.tolist()
    (file,) = tmp_path.glob(f"*/{name}")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[:-3] if damage == "cut" else b"?" + whole[1:])
    with pytest.warns(UserWarning, match=f"{name} are damaged and are made again"):
        again = some(tmp_path)
    assert file.read_bytes() == whole
    assert again.flat.tokens.tolist() == tokens


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path) -> None:
    def breaks(notes: Notes) -> Iterator[Flat]:
        yield from in_chunks([Example([5], [True])])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_examples(tmp_path, 0, 10, breaks)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    (key,) = (path.stem for path in tmp_path.glob("*.lock"))
    left = tmp_path / f".{key}.0123.tmp"  # as a killed process leaves it
    left.mkdir()
    some(tmp_path)
    assert not left.exists()


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="token id 10, the target's vocabulary ends at 9"):
        some(tmp_path, 0, [Example([10], [True])])
