"""A static key-value cache whose requests can go back: rejected drafts are forgotten by moving a number.

B = requests of a pass, n = tokens that each reads, S = keys that it attends to, d = head size.

transformers' dynamic cache copies all keys and values at every token. Here every layer has one buffer for all requests
of a batch, and a pass writes wherever it is told to, in one operation however much the lengths of the requests differ.
What a request holds is the caller's knowledge: its texts and drafts follow one another, and what lies behind them is
hidden by masks and written over. A request that goes is copied over by the one that takes its place."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from specdraft.decoding.compilation import is_active
from specdraft.decoding.passes import Pass

_BUCKET = 128  # tokens by which capacities differ


class _Places:
    """What all layers of a cache share: its size, and what the next pass reads. It is apart from the cache, because
    layers that knew the cache would be in a circle with it: gigabytes would wait for Python's collector, which counts
    objects, not bytes."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, -(-capacity // _BUCKET) * _BUCKET
        self.first = self.held = self.size = self.count = 0
        self._places = torch.empty((0, 0), dtype=torch.int64)
        self._index: dict[tuple[int, torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    def begin(self, reading: Pass, first: int) -> None:
        """The next pass reads this, of the requests from ``first`` on."""
        self.first, self.count, self.held, self.size = first, len(reading.ids), reading.held, reading.size
        self._places = reading.places
        # At once for what the pass before asked for: a compiled pass that made them in it would be another graph.
        self._index = {asked: self._made(*asked) for asked in self._index}

    def index(self, heads: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Where a layer of so many heads writes: requests, heads and places, together ``[B, heads, n]``."""
        if (heads, device) not in self._index:
            self._index[heads, device] = self._made(heads, device)
        return self._index[heads, device]

    def _made(self, heads: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        places = self._places[:, None].to(device)
        rows = torch.arange(len(places), device=device)[:, None, None]
        return rows, torch.arange(heads, device=device)[:, None], places


class _StaticLayer(DynamicLayer):
    """One layer's keys and values, ``[requests, heads, capacity, d]``."""

    def __init__(self, places: _Places) -> None:
        super().__init__()
        self.places = places
        self._window: tuple[Tensor, Tensor] | None = None  # keys and values of the pass's requests

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros, because what no request has written is read where one is shorter than another: masked, but not NaN.
        size, capacity = self.places.rows, self.places.capacity
        self.keys = key_states.new_zeros((size, key_states.shape[1], capacity, key_states.shape[3]))
        self.values = value_states.new_zeros((size, value_states.shape[1], capacity, value_states.shape[3]))
        self.is_initialized = True

    def narrow(self, first: int, end: int) -> None:
        """The next passes read requests from ``first`` up to ``end``."""
        self._window = (self.keys[first:end], self.values[first:end]) if self.is_initialized else None
        if self._window is not None and is_active():  # or a graph would reckon with heads and their size as unknowns
            for each in self._window:
                torch._dynamo.mark_static(each, [1, 3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new ones ``[B, heads, n, d]``; returns those to attend to, ``[B, heads, S, d]``."""
        places = self.places
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._window is None:
            self.narrow(places.first, places.first + len(key_states))
        assert self._window is not None
        keys, values = self._window
        index = places.index(key_states.shape[1], self.device)
        keys.index_put_(index, key_states)
        values.index_put_(index, value_states)
        return keys[:, :, : places.size], values[:, :, : places.size]

    def get_seq_length(self) -> int:
        """Of the tokens before the pass, where transformers makes the mask itself."""
        return self.places.held


class StaticCache(Cache):
    """A ``transformers`` cache of full-attention layers with room for ``capacity`` tokens of each of ``rows`` requests.
    Sliding-window layers are held whole: transformers' masks hide what lies outside the window, and a rejected draft
    can then be undone, which a ring buffer cannot do."""

    layers: list[_StaticLayer]

    def __init__(self, num_layers: int, rows: int, capacity: int) -> None:
        self.places = _Places(rows, capacity)
        super().__init__(layers=[_StaticLayer(self.places) for _ in range(num_layers)])

    def begin(self, reading: Pass, first: int = 0) -> None:
        """Say what the next pass reads, of the requests from ``first`` on. Raises ValueError beyond the capacity."""
        if reading.size > self.places.capacity:
            raise ValueError(f"the pass needs {reading.size} places of {self.places.capacity}")
        count = len(reading.ids)
        if (first, count) != (self.places.first, self.places.count):
            for layer in self.layers:
                layer.narrow(first, first + count)
        self.places.begin(reading, first)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy places ``[B, m]`` of the first B requests to others: accepted nodes move up to where the text ends."""
        rows = torch.arange(len(source), device=source.device)[:, None]
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                here = [part.to(buffer.device) for part in (rows, source, destination)]
                buffer[here[0], :, here[2]] = buffer[here[0], :, here[1]]

    def copy(self, source: int, row: int, length: int) -> None:
        """Give a request what the one in ``source`` holds of its first ``length`` tokens."""
        for layer in self.layers if row != source else ():
            for buffer in (layer.keys, layer.values):
                buffer[row, :, :length] = buffer[source, :, :length]
