"""A key-value cache whose length can go back: rejected drafts are forgotten by moving a number.

transformers' dynamic cache copies all keys and values at every token; here each layer writes into a buffer that
doubles when full and hands out views, so that a step costs what it writes, and rolling back costs nothing.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class _BufferedLayer(DynamicLayer):
    """One layer's keys and values ``[B, heads, capacity, head_dim]``, of which the first ``length`` are valid."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_empty((*key_states.shape[:2], self.capacity, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], self.capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[-2]
        if end > self.capacity:
            self.capacity = max(end, 2 * self.capacity)
            for name, buffer in (("keys", self.keys), ("values", self.values)):
                grown = buffer.new_empty((*buffer.shape[:2], self.capacity, buffer.shape[3]))
                grown[:, :, : self.length] = buffer[:, :, : self.length]
                setattr(self, name, grown)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.length = 0


class RewindableCache(Cache):
    """A ``transformers`` cache of full-attention layers with room for ``capacity`` tokens (it grows beyond).

    Sliding-window layers are held whole: transformers' masks hide what lies outside the window, and a rejected draft
    can then be undone, which a ring buffer cannot do.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[_BufferedLayer(capacity) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self.get_seq_length()

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        for layer in self.layers:
            assert isinstance(layer, _BufferedLayer) and length <= layer.length
            layer.length = length
