"""The rewindable cache against transformers' own, which copies, and its ragged rows against plain lists."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from specdraft.decoding.cache import RewindableCache


def pieces(*lengths, value_dim=6):
    """Keys ``[1, 2, t, 6]`` and values of a head size of their own."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(1, 2, t, 6, generator=g), torch.randn(1, 2, t, value_dim, generator=g)) for t in lengths]


@pytest.mark.parametrize("capacity", [1, 4, 100])
@pytest.mark.parametrize("value_dim", [6, 3])
def test_equals_the_copying_cache_and_grows(capacity, value_dim):
    ours, theirs = RewindableCache(2, capacity), DynamicCache()
    for key, value in pieces(3, 1, 6, 1, value_dim=value_dim):
        for layer in range(2):
            mine, plain = ours.update(key + layer, value, layer), theirs.update(key + layer, value, layer)
            assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
        assert ours.length == ours.get_seq_length() == theirs.get_seq_length()


def test_what_is_cropped_is_forgotten():
    (first, drafted, true) = pieces(4, 3, 2)
    cache = RewindableCache(2, 5)
    for key, value in (first, drafted):
        for layer in range(2):
            cache.update(key, value, layer)
    cache.crop(5)
    assert cache.length == 5
    for layer in range(2):
        keys, values = cache.update(*true, layer)
        assert torch.equal(keys, torch.cat([first[0], drafted[0][:, :, :1], true[0]], dim=2))
        assert torch.equal(values, torch.cat([first[1], drafted[1][:, :, :1], true[1]], dim=2))
    assert cache.length == 7


def test_within_its_capacity_it_writes_in_place():
    cache = RewindableCache(1, 8)
    (first, second) = pieces(3, 2)
    before = cache.update(*first, 0)[0].data_ptr()
    assert cache.update(*second, 0)[0].data_ptr() == before


def test_it_cannot_be_cropped_to_more_than_it_holds():
    cache = RewindableCache(1, 8)
    cache.update(*pieces(3)[0], 0)
    with pytest.raises(AssertionError):
        cache.crop(4)


class Rows:
    """What a ragged cache must hold, as plain lists of tensors ``[heads, length, d]`` per layer and row."""

    def __init__(self, num_layers: int = 2) -> None:
        self.cache = RewindableCache(num_layers, 4)
        self.layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]
        self.generator = torch.Generator().manual_seed(0)

    def random(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        draw = partial(torch.randn, generator=self.generator)
        return draw(rows, 2, length, 6), draw(rows, 2, length, 3)

    def read(self, length: int) -> None:
        """A pass of all rows; it must see what was held, and what it brings behind that."""
        for index, layer in enumerate(self.layers):
            new = self.random(len(layer), length)
            seen = self.cache.update(*new, index)
            assert all(part.shape[2] == max(row[0].shape[1] for row in layer) + length for part in seen)
            for row, held in enumerate(layer):
                layer[row] = tuple(torch.cat([old, part[row]], dim=1) for old, part in zip(held, new, strict=True))
                for part, whole in zip(seen, layer[row], strict=True):
                    assert torch.equal(part[row, :, : whole.shape[1]], whole)
                    assert part.isfinite().all()  # beyond a short row's end, too: masked, but read

    def join(self, *sizes: tuple[int, int]) -> None:
        """Rows of ``(length, capacity)``, all at once."""
        joining = []
        for length, capacity in sizes:
            joining.append(RewindableCache(len(self.layers), capacity))
            for index, layer in enumerate(self.layers):
                new = self.random(1, length)
                joining[-1].update(*new, index)
                layer.append((new[0][0], new[1][0]))
        self.cache.join(joining)

    def keep(self, row: int, length: int, path: Sequence[int]) -> None:
        kept = [*range(length), *(length + offset for offset in path)]
        for layer in self.layers:
            layer[row] = tuple(part[:, kept] for part in layer[row])
        self.cache.keep(row, length, path)

    def drop(self, row: int) -> None:
        for layer in self.layers:
            layer[row] = layer[-1]
            layer.pop()
        self.cache.drop(row)

    def lengths(self) -> list[int]:
        (lengths,) = {tuple(row[0].shape[1] for row in layer) for layer in self.layers}
        return list(lengths)

    def check(self) -> None:
        assert self.cache.lengths == self.lengths()
        assert self.cache.length == self.cache.get_seq_length() == max(self.lengths())
        for layer, rows in zip(self.cache.layers, self.layers, strict=True):
            assert layer.lengths == self.lengths()
            assert layer.keys.shape[2] == layer.values.shape[2] == layer.capacity
            for row, (keys, values) in enumerate(rows):
                assert torch.equal(layer.keys[row, :, : keys.shape[1]], keys)
                assert torch.equal(layer.values[row, :, : values.shape[1]], values)


@pytest.mark.parametrize("path", [(), (0,), (0, 1, 2), (1,), (1, 3), (0, 2, 5), (2, 3, 5)])
def test_an_accepted_path_moves_up_to_where_the_text_goes_on(path):
    rows = Rows()
    for length in (5, 2, 9):
        rows.join((length, 16))
    rows.read(7)  # the last token and six nodes
    rows.keep(1, 3, path)
    rows.check()
    assert rows.cache.lengths == [12, 3 + len(path), 16]
    rows.read(2)
    rows.check()


def test_a_row_that_keeps_nothing_new_is_as_before():
    rows = Rows()
    for length in (3, 6):
        rows.join((length, 8))
    rows.read(3)
    for row, length in enumerate((3, 6)):
        rows.keep(row, length, ())
    rows.check()
    assert rows.cache.lengths == [3, 6]


@pytest.mark.parametrize("capacities", [(4, 4), (4, 40), (40, 4)])
def test_joined_rows_of_other_capacities(capacities):
    rows = Rows()
    for size in zip((3, 4), capacities, strict=True):
        rows.join(size)
    rows.check()
    assert {layer.capacity for layer in rows.cache.layers} == {max(capacities)}


def test_rows_that_join_at_once_are_copied_once():
    rows = Rows()
    rows.join((3, 4), (5, 9), (1, 1))
    rows.check()
    before = [layer.keys for layer in rows.cache.layers]
    rows.join()
    assert all(layer.keys is keys for layer, keys in zip(rows.cache.layers, before, strict=True))
    rows.join((2, 2), (12, 12))
    rows.check()
    rows.read(3)
    rows.check()


def test_a_drop_copies_no_other_row():
    rows = Rows()
    rows.join((3, 4), (5, 9), (1, 1))
    before = [layer.keys.data_ptr() for layer in rows.cache.layers]
    rows.drop(0)
    assert [layer.keys.data_ptr() for layer in rows.cache.layers] == before
    rows.check()


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_last_row_takes_the_place_of_a_dropped_one(row):
    rows = Rows()
    for length in (5, 1, 3):
        rows.join((length, 4))
    rows.drop(row)
    rows.check()
    rows.read(2)
    rows.join((4, 2))
    rows.read(1)
    rows.check()


@pytest.mark.parametrize("seed", range(10))
def test_a_long_life_against_the_plain_reference(seed):
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    rows = Rows()
    rows.join((3, 2))
    for _ in range(25):
        before = rows.lengths()
        size = number(1, 6)
        rows.read(size)
        for row, length in enumerate(before):
            path = [offset for offset in range(size - 1) if number(0, 1)]
            rows.keep(row, length + 1, path)
        rows.check()
        if len(before) > 1 and number(0, 3) == 0:
            rows.drop(number(0, len(before) - 1))
        if len(before) < 4 and number(0, 2) == 0:
            rows.join(*((number(1, 9), number(1, 20)) for _ in range(number(1, 2))))
        rows.check()


def test_a_path_cannot_be_longer_than_what_was_read():
    rows = Rows()
    rows.join((4, 4))
    with pytest.raises(AssertionError):
        rows.cache.keep(0, 3, (0, 1))
