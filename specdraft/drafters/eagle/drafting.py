"""How an EAGLE head drafts: the keys of each request, and the passes that requests share.

n = positions of a request that are read, m = those of them that are queries, N = nodes, H = hidden size, Hq / Hk =
query / key-value heads, d = head size, Vd = draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import Shape
from specdraft.decoding.tree import DraftTree
from specdraft.drafters.base import BatchDrafter
from specdraft.drafters.draft_tree_builder import Level, Vocabulary, grow_batch
from specdraft.drafters.eagle.forward import Attend, Output
from specdraft.drafters.eagle.rotary import RotaryTable
from specdraft.targets import Features


@dataclass
class CachedKeys:
    """Keys and values of one request while decoding; its attention, of the last of the positions that are appended.

    ``length`` positions are valid; setting it back forgets what was drafted after them.
    """

    capacity: int
    length: int = 0
    _buffers: list[Tensor] = field(default_factory=list)  # keys, values [Hk, capacity, d]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        """Append key and value ``[n, Hk, d]``; attend with the queries ``[m, Hq, d]`` of the last m positions.

        seen: bool ``[m, D]``, which of the last D positions each query may attend to (a draft tree), with all before;
        None for a single query, which sees everything.
        """
        assert seen is not None or len(query) == 1
        end = self.length + len(key)
        if not self._buffers or end > self.capacity:
            self.capacity = max(end, self.capacity if not self._buffers else 2 * self.capacity)
            old, shape = self._buffers, (key.shape[1], self.capacity, key.shape[2])
            self._buffers = [key.new_empty(shape), key.new_empty(shape)]
            for new, previous in zip(self._buffers, old, strict=False):
                new[:, : self.length] = previous[:, : self.length]
        for buffer, added in zip(self._buffers, (key, value), strict=True):
            buffer[:, self.length : end] = added.transpose(0, 1)
        self.length = end
        keys, values = (buffer[None, :, :end] for buffer in self._buffers)
        mask = None if seen is None else pad(seen, (end - seen.shape[1], 0), value=True)
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


@dataclass
class EagleState:
    """A request: the keys of all emitted positions, and the output at the last one (n = 1)."""

    keys: CachedKeys
    output: Output | None = None


class EagleDrafting(BatchDrafter):
    """The decoding half of an EAGLE head."""

    rotary: RotaryTable

    @property
    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The draft vocabulary."""

    @abstractmethod
    def _feature(self, features: Features) -> Tensor:
        """The target's features ``[B, T, ...]`` as the head reads them, ``[B * T, H]``."""

    @abstractmethod
    def _read(self, tokens: Tensor, feature: Tensor, attend: Attend) -> Output:
        """The one forward of training and decoding: tokens ``[N]``, feature ``[N, H]`` -> the queries' output."""

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, Vd]`` of ``hidden [n, H]``."""

    def start(self, first_token: int, max_length: int) -> EagleState:
        """An empty state; the first token has no feature before it, so the head never sees it."""
        return EagleState(CachedKeys(max_length))

    def advance(self, state: EagleState, tokens: Tensor, features: Features) -> None:
        """Append what was emitted; its keys replace those of what was drafted there."""
        self.advance_batch([state], [tokens], [features])

    def advance_batch(
        self, states: Sequence[EagleState], tokens: Sequence[Tensor], features: Sequence[Features]
    ) -> None:
        """In one pass over the positions of all requests."""
        together = type(features[0])(*(torch.cat(parts, dim=1) for parts in zip(*features, strict=True)))
        outputs = self._append([state.keys for state in states], tokens, self._feature(together))
        for state, output in zip(states, outputs, strict=True):
            state.output = output

    def draft_batch(
        self,
        states: Sequence[EagleState],
        shapes: Sequence[Shape],
        sampling: Sampling,
        generators: Sequence[torch.Generator | None],
    ) -> list[DraftTree]:
        """A pass for each level of all drafts; every node reads the feature that its parent gave."""
        emitted = [state.keys.length for state in states]
        outputs = {number: state.output for number, state in enumerate(states) if state.output is not None}
        assert len(outputs) == len(states), "advance comes before draft"

        def expand(levels: Mapping[int, Level]) -> Sequence[Tensor]:
            requests = [states[number].keys for number in levels]
            feature = torch.cat([outputs[number].feature[level.parents] for number, level in levels.items()])
            # All of a level stand at one position.
            positions = [[emitted[number] + level.depth - 1] * len(level.tokens) for number, level in levels.items()]
            tokens, seen = [level.tokens for level in levels.values()], [level.seen for level in levels.values()]
            read = self._append(requests, tokens, feature, positions, seen)
            outputs.update(zip(levels, read, strict=True))
            return self._logits(torch.cat([output.hidden for output in read])).split([len(each) for each in tokens])

        logits = self._logits(torch.cat([output.hidden for output in outputs.values()]))
        drafts = grow_batch(logits, expand, shapes, sampling, generators, self.vocabulary)
        for state, length in zip(states, emitted, strict=True):
            state.keys.length = length
        return drafts

    def _append(
        self,
        requests: Sequence[CachedKeys],
        tokens: Sequence[Tensor],
        feature: Tensor,
        positions: Sequence[Sequence[int]] | None = None,
        seen: Sequence[Tensor | None] | None = None,
    ) -> list[Output]:
        """Read tokens ``[n]`` after the keys of each request in one pass; feature ``[sum of n, H]``.

        Of text the output at the last token of each; of a level of drafts, whose ``positions`` and ``seen`` (see
        ``CachedKeys``) are given, that at every node.
        """
        added = [len(each) for each in tokens]
        if positions is None:
            positions = [range(keys.length, keys.length + count) for keys, count in zip(requests, added, strict=True)]
        flat = list(chain.from_iterable(positions))
        cos, sin = self.rotary(max(flat) + 1, next(self.parameters()))
        here = torch.tensor(flat, device=cos.device)
        asked, masks = (added, seen) if seen is not None else ([1] * len(added), [None] * len(added))
        queries = slice(None) if seen is not None else torch.tensor([end - 1 for end in accumulate(added)]).to(here)

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts = zip(requests, query.split(asked), key.split(added), value.split(added), masks, strict=True)
            return torch.cat([keys(*given) for keys, *given in parts])

        output = self._read(torch.cat(list(tokens)), feature, Attend(cos[here], sin[here], attention, queries))
        return [Output(*parts) for parts in zip(*(part.split(asked) for part in output), strict=True)]
