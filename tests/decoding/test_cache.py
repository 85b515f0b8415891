"""The static cache against transformers' own, which copies, and its ragged rows against plain lists."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.passes import Pass

HEADS, BUCKET = 2, 128


def pieces(*lengths, value_dim=6):
    """Keys ``[1, 2, t, 6]`` and values of a head size of their own."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(1, 2, t, 6, generator=g), torch.randn(1, 2, t, value_dim, generator=g)) for t in lengths]


def text(cache: StaticCache, row: int, held: int, count: int) -> None:
    """The next pass reads so many tokens of one request."""
    cache.begin(Pass.text(torch.zeros(1, count, dtype=torch.int64), torch.tensor([held]), held, simple=True), row)


@pytest.mark.parametrize("value_dim", [6, 3])
@pytest.mark.parametrize("row", [0, 2])
def test_equals_the_copying_cache(row, value_dim):
    ours, theirs = StaticCache(2, 3, 20), DynamicCache()
    held = 0
    for key, value in pieces(3, 1, 6, 1, value_dim=value_dim):
        text(ours, row, held, key.shape[2])
        assert ours.get_seq_length() == theirs.get_seq_length() == held
        for layer in range(2):
            mine, plain = ours.update(key + layer, value, layer), theirs.update(key + layer, value, layer)
            assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
        held += key.shape[2]


def test_what_is_written_over_is_forgotten():
    (first, drafted, true) = pieces(4, 3, 2)
    cache = StaticCache(2, 1, 16)
    for held, (key, value) in ((0, first), (4, drafted)):
        text(cache, 0, held, key.shape[2])
        for layer in range(2):
            cache.update(key, value, layer)
    text(cache, 0, 5, 2)  # of three drafted tokens one is kept
    for layer in range(2):
        keys, values = cache.update(*true, layer)
        assert torch.equal(keys, torch.cat([first[0], drafted[0][:, :, :1], true[0]], dim=2))
        assert torch.equal(values, torch.cat([first[1], drafted[1][:, :, :1], true[1]], dim=2))


def test_it_writes_in_place():
    cache = StaticCache(1, 2, 8)
    (first, second) = pieces(3, 2)
    text(cache, 0, 0, 3)
    before = cache.update(*first, 0)[0].data_ptr()
    text(cache, 0, 3, 2)
    assert cache.update(*second, 0)[0].data_ptr() == before


@pytest.mark.parametrize(("asked", "given"), [(1, BUCKET), (BUCKET, BUCKET), (BUCKET + 1, 2 * BUCKET)])
def test_a_pass_beyond_the_capacity_is_refused(asked, given):
    cache = StaticCache(1, 1, asked)
    assert cache.places.capacity == given
    text(cache, 0, given - 2, 2)
    with pytest.raises(ValueError, match=f"the pass needs {given + 1} places of {given}"):
        text(cache, 0, given - 2, 3)


class Rows:
    """What the cache must hold, as plain lists of tensors ``[heads, length, d]`` per layer and row."""

    def __init__(self, rows: int = 4, capacity: int = 60, num_layers: int = 2) -> None:
        self.cache = StaticCache(num_layers, rows, capacity)
        self.layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]
        self.generator = torch.Generator().manual_seed(0)

    @property
    def lengths(self) -> list[int]:
        (lengths,) = {tuple(row[0].shape[1] for row in layer) for layer in self.layers}
        return list(lengths)

    def random(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        draw = partial(torch.randn, generator=self.generator)
        return draw(rows, HEADS, length, 6), draw(rows, HEADS, length, 3)

    def begin(self, length: int) -> None:
        """A prompt in a row of its own."""
        row = len(self.layers[0])
        text(self.cache, row, 0, length)
        for index, layer in enumerate(self.layers):
            new = self.random(1, length)
            assert all(torch.equal(*pair) for pair in zip(self.cache.update(*new, index), new, strict=True))
            layer.append((new[0][0], new[1][0]))

    def read(self, size: int) -> None:
        """A pass of all rows; it must see what was held, and what it brings behind that."""
        lengths = torch.tensor(self.lengths)
        longest = int(lengths.max())
        self.cache.begin(Pass.text(torch.zeros(len(lengths), size, dtype=torch.int64), lengths, longest))
        for index, layer in enumerate(self.layers):
            new = self.random(len(layer), size)
            seen = self.cache.update(*new, index)
            assert all(part.shape[2] == longest + size for part in seen)
            for row, held in enumerate(layer):
                layer[row] = tuple(torch.cat([old, part[row]], dim=1) for old, part in zip(held, new, strict=True))
                for part, whole in zip(seen, layer[row], strict=True):
                    assert torch.equal(part[row, :, : whole.shape[1]], whole)
                    assert part.isfinite().all()  # beyond a short row's end, too: masked, but read

    def keep(self, lengths: list[int], paths: list[list[int]]) -> None:
        """Of every row its first ``length`` tokens, and of those behind the ones on its path."""
        size = max(map(len, paths))
        start = torch.tensor(lengths)[:, None]
        index = torch.arange(size).expand(len(paths), size)
        source = torch.tensor([[*path, *range(len(path), size)] for path in paths], dtype=torch.int64)
        self.cache.move(start + source.view(index.shape), start + index)
        for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
            kept = [*range(length), *(length + offset for offset in path)]
            for layer in self.layers:
                layer[row] = tuple(part[:, kept] for part in layer[row])

    def drop(self, row: int) -> None:
        last = len(self.layers[0]) - 1
        self.cache.copy(last, row, self.lengths[last])
        for layer in self.layers:
            layer[row] = layer[-1]
            layer.pop()

    def check(self) -> None:
        for layer, rows in zip(self.cache.layers, self.layers, strict=True):
            assert (
                layer.keys.shape[:3]
                == layer.values.shape[:3]
                == (self.cache.places.rows, HEADS, self.cache.places.capacity)
            )
            for row, (keys, values) in enumerate(rows):
                assert torch.equal(layer.keys[row, :, : keys.shape[1]], keys)
                assert torch.equal(layer.values[row, :, : values.shape[1]], values)


def rows_of(*lengths: int) -> Rows:
    rows = Rows()
    for length in lengths:
        rows.begin(length)
    return rows


@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [1], [1, 3], [0, 2, 5], [2, 3, 5]], ids=str)
def test_an_accepted_path_moves_up_to_where_the_text_goes_on(path):
    rows = rows_of(5, 2, 9)
    rows.read(7)  # the last token and six nodes
    rows.keep([6, 3, 10], [[0, 3], path, []])
    rows.check()
    assert rows.lengths == [8, 3 + len(path), 10]
    rows.read(2)
    rows.check()


def test_moving_touches_nothing_but_its_destination():
    rows = rows_of(5, 2, 9)
    rows.read(7)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in rows.cache.layers]
    rows.keep([6, 3], [[1, 3], [0, 1]])  # of the first two requests
    rows.check()
    for layer, (keys, values) in zip(rows.cache.layers, before, strict=True):
        keys[0, :, 6:8], values[0, :, 6:8] = keys[0][:, [7, 9]], values[0][:, [7, 9]]
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_a_drop_copies_one_row_and_no_other():
    rows = rows_of(5, 1, 3, 2)
    buffers = [(layer.keys, layer.values) for layer in rows.cache.layers]
    before = [tuple(part.clone() for part in pair) for pair in buffers]
    rows.drop(3)  # the last one itself
    assert all(torch.equal(a, b) for pair in zip(buffers, before, strict=True) for a, b in zip(*pair, strict=True))
    rows.drop(0)
    rows.check()
    for layer, pair, old in zip(rows.cache.layers, buffers, before, strict=True):
        assert layer.keys is pair[0] and layer.values is pair[1]
        for part, whole in zip(pair, old, strict=True):
            assert torch.equal(part[1:], whole[1:])
            assert torch.equal(part[0, :, :3], whole[2, :, :3])
            assert torch.equal(part[0, :, 3:], whole[0, :, 3:])  # what is behind the text is not copied


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_last_row_takes_the_place_of_a_dropped_one(row):
    rows = rows_of(5, 1, 3)
    rows.drop(row)
    rows.check()
    rows.read(2)
    rows.begin(4)
    rows.read(1)
    rows.check()


def test_the_prompt_of_a_request_touches_no_other():
    rows = rows_of(5, 3)
    rows.read(2)
    rows.drop(0)
    rows.begin(2)  # where a longer one was
    rows.check()
    rows.read(1)
    rows.check()


def test_a_pass_writes_rows_of_all_lengths_in_one_operation(monkeypatch):
    rows, calls = rows_of(5, 2, 9), []
    write = Tensor.index_put_
    monkeypatch.setattr(Tensor, "index_put_", lambda *arguments: calls.append(1) or write(*arguments))
    rows.read(3)
    assert len(calls) == 2 * 2  # keys and values of two layers


def test_what_nobody_wrote_is_read_as_zeros():
    """Masked, but NaN would come through."""
    torch.use_deterministic_algorithms(True)  # memory that is not initialized is NaN
    try:
        rows = rows_of(5, 2)
        rows.read(3)
    finally:
        torch.use_deterministic_algorithms(False)
    for layer in rows.cache.layers:
        assert not layer.keys[1, :, 5:].any() and not layer.values[1, :, 5:].any()


@pytest.mark.parametrize("seed", range(10))
def test_a_long_life_against_the_plain_reference(seed):
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    rows = Rows(capacity=25 * 7 + 10)
    rows.begin(3)
    for _ in range(25):
        before, size = rows.lengths, number(1, 6)
        rows.read(size)
        paths = [[offset for offset in range(size - 1) if number(0, 1)] for _ in before]
        rows.keep([length + 1 for length in before], paths)
        rows.check()
        if len(before) > 1 and number(0, 3) == 0:
            rows.drop(number(0, len(before) - 1))
        for _ in range(number(0, 2) if len(rows.lengths) < 3 else 0):
            rows.begin(number(1, 9))
        rows.check()


def test_a_cache_is_freed_as_soon_as_nobody_holds_it() -> None:
    cache = StaticCache(2, 3, 40)
    layer = weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None  # and not when the collector comes by
    finally:
        gc.enable()
