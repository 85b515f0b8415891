"""A key-value cache whose requests can go back: rejected drafts are forgotten by moving a number.

B = requests decoded side by side, n = tokens read in a pass, d = head size.

transformers' dynamic cache copies all keys and values at every token; here each layer writes into a buffer that
doubles when full and hands out views, so that a step costs what it writes, and rolling back costs nothing. The
requests of a batch may have different lengths: each writes after its own end."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, DynamicLayer


class _BufferedLayer(DynamicLayer):
    """One layer's keys and values ``[B, heads, capacity, d]``; request b holds ``lengths[b]`` valid positions."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.lengths: list[int] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values, self.lengths = key_states, value_states, [0] * len(key_states)
        self.reserve(self.capacity)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        added, longest = key_states.shape[-2], max(self.lengths)
        end = longest + added
        if end > self.capacity:
            self.reserve(max(end, 2 * self.capacity))
        if min(self.lengths) == longest:
            self.keys[:, :, longest:end] = key_states
            self.values[:, :, longest:end] = value_states
        else:
            for request, start in enumerate(self.lengths):
                self.keys[request, :, start : start + added] = key_states[request]
                self.values[request, :, start : start + added] = value_states[request]
        self.lengths = [length + added for length in self.lengths]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` positions."""
        used = max(self.lengths)
        for name, buffer in (("keys", self.keys), ("values", self.values)):
            # Zeros, because a request that is shorter than its neighbors is read beyond its end: masked, but not NaN.
            grown = buffer.new_zeros((*buffer.shape[:2], capacity, buffer.shape[3]))
            grown[:, :, :used] = buffer[:, :, :used]
            setattr(self, name, grown)
        self.capacity = capacity

    def get_seq_length(self) -> int:
        return max(self.lengths, default=0)

    def reset(self) -> None:
        self.lengths = [0] * len(self.lengths)


class RewindableCache(Cache):
    """A ``transformers`` cache of full-attention layers with room for ``capacity`` tokens a request (it grows beyond).
    Sliding-window layers are held whole: transformers' masks hide what lies outside the window, and a rejected draft
    can then be undone, which a ring buffer cannot do."""

    layers: list[_BufferedLayer]

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[_BufferedLayer(capacity) for _ in range(num_layers)])

    @property
    def lengths(self) -> list[int]:
        """Number of tokens held by every request; empty before the first pass."""
        return list(self.layers[0].lengths)

    @property
    def length(self) -> int:
        """Number of tokens held by the longest request."""
        return self.get_seq_length()

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of a cache of one request."""
        if length != self.length:
            self.keep(0, length, ())

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        """Keep of a request its first ``length`` tokens and of those after them the ascending offsets ``path``: the
        accepted nodes of a tree move up to where the text goes on."""
        chosen = None
        if list(path) != list(range(len(path))):  # a chain's nodes already lie where they belong
            chosen = torch.tensor(path, device=self.layers[0].keys.device) + length
        for layer in self.layers:
            assert length + len(path) <= layer.lengths[request]
            if chosen is not None:
                for buffer in (layer.keys, layer.values):
                    buffer[request, :, length : length + len(path)] = buffer[request].index_select(1, chosen)
            layer.lengths[request] = length + len(path)

    def join(self, others: Sequence["RewindableCache"]) -> None:
        """Append the requests of ``others``, which are used up, after those held; buffers grow to the largest capacity.
        All that is held is copied once."""
        if others and not self.lengths:
            self.layers, others = others[0].layers, others[1:]
        if not others:
            return
        for layer, *added in zip(self.layers, *(other.layers for other in others), strict=True):
            capacity = max(each.capacity for each in (layer, *added))
            for each in (layer, *added):
                if each.capacity < capacity:
                    each.reserve(capacity)
            layer.keys = torch.cat([layer.keys, *(each.keys for each in added)])
            layer.values = torch.cat([layer.values, *(each.values for each in added)])
            for each in added:
                layer.lengths = layer.lengths + each.lengths
                each.keys = each.values = layer.keys[:0]  # free: two whole copies of all layers may not fit

    def drop(self, request: int) -> None:
        """Forget a request; the last one takes its place, so that no other is copied."""
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                buffer[request] = buffer[-1]
            layer.keys, layer.values = layer.keys[:-1], layer.values[:-1]
            layer.lengths[request] = layer.lengths[-1]
            layer.lengths.pop()


class _LayerSideBySide(DynamicLayer):
    """One layer of several caches of one request each; what it hands out is padded to the longest."""

    def __init__(self, requests: Sequence[_BufferedLayer]) -> None:
        super().__init__()
        self.requests = requests

    @property
    def lengths(self) -> list[int]:
        return [length for request in self.requests for length in (request.lengths or [0])]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        added = zip(self.requests, key_states.split(1), value_states.split(1), strict=True)
        held = [request.update(key, value) for request, key, value in added]  # [1, heads, length, d] each
        padded = (
            pad_sequence([part[0].transpose(0, 1) for part in parts], batch_first=True).transpose(1, 2)
            for parts in zip(*held, strict=True)
        )
        return next(padded), next(padded)

    def get_seq_length(self) -> int:
        return max(self.lengths)


class CachesSideBySide(Cache):
    """Caches of one request each, read in one pass: every pass copies what they hold into one padded batch. For models
    whose caches are small (a draft's), in batches that change from pass to pass."""

    layers: list[_LayerSideBySide]

    def __init__(self, caches: Sequence[RewindableCache]) -> None:
        super().__init__(layers=[_LayerSideBySide(layers) for layers in zip(*(c.layers for c in caches), strict=True)])

    @property
    def lengths(self) -> list[int]:
        """Number of tokens held by every request."""
        return self.layers[0].lengths
