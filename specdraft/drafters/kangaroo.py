"""Kangaroo (2404.18911): the target's first layers and a small adapter behind them draft; the target verifies.

R = positions of the flat batch, N = positions of a pass, n = queries, B = requests, m = nodes of a level, H = hidden
size, V = vocabulary.

The adapter is an attention between two norms, without an MLP; the target's own LM head reads it. A draft
is never behind on the text: the first layers' keys of it stand in the target's cache, and the adapter's own are made
from what the target has computed on its way. So the draft of a token is a function of the text alone, whatever its
depth, and one step of training is all that there is to learn.

The paper's second exit, where a draft ends when it is unsure, is ``decoding/shape=confident_chain``."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.passes import Pass, Texts
from specdraft.drafters.alignment import Alignment, StepDecay
from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.eagle.borrowed_head import BorrowedHead
from specdraft.drafters.eagle.compiled import run_layer
from specdraft.drafters.eagle.drafting import EagleDrafting
from specdraft.drafters.eagle.forward import Attend, Attends, Attention, Output
from specdraft.drafters.layers import RMSNorm, initialize, shape_of
from specdraft.drafters.unrolled_keys import UnrolledKeys
from specdraft.errors import UserError
from specdraft.losses.chunked import Step
from specdraft.targets import Features, LanguageModel, Target
from specdraft.targets.partial import without_layers


class Kangaroo(BorrowedHead):
    """The adapter behind the target's first ``exit_layer`` layers."""

    TITLE = "Kangaroo"
    training_options = frozenset({"sequence_mean", "divergence"})

    def __init__(self, exit_layer: int, **shared: Any) -> None:
        """Build with random weights, the adapter's output at zero: untrained, it is the exit itself. ``shared`` is what
        every ``EagleHead`` takes but the unrolled steps, of which there is one."""
        arguments = constructor_arguments(locals())
        super().__init__(ttt_steps=1, **shared)
        del self._arguments["ttt_steps"]
        self._arguments |= arguments
        self.exit_layer, self.layers = exit_layer, (exit_layer,)
        self.adapter = Adapter(self.layer_config)
        self.apply(initialize)
        nn.init.zeros_(self.adapter.self_attn.o_proj.weight)

    @classmethod
    def for_target(
        cls, target: Target, draft_vocabulary: Tensor | None = None, exit_layer: int | None = None, **options: Any
    ) -> "Kangaroo":
        """An adapter shaped like the attention of ``target``, which leaves it after ``exit_layer`` layers (None: a
        tenth of them, at least 2). Raises UserError for a layer that it has not, and for a draft vocabulary that is not
        the whole."""
        cls.check_whole(target, draft_vocabulary)
        leaves = min(max(2, round(target.num_layers / 10)), target.num_layers - 1) if exit_layer is None else exit_layer
        if not 0 < leaves < target.num_layers:
            said = f"Kangaroo with exit_layer={leaves}: expected 1 to {target.num_layers - 1}"
            raise UserError(f"{said} of the target's {target.num_layers}")
        drafter = cls(leaves, **shape_of(target, None), **options)
        drafter.bind(target)
        return drafter

    @cached_property
    def first_layers(self) -> LanguageModel:
        """The target's first layers, as a model whose last hidden state is that after them."""
        return without_layers(self.target, range(self.exit_layer, self.target.num_layers), final_norm=False)

    def bind(self, target: Target) -> None:
        """See ``Drafter``."""
        if self.target is not target:
            self.__dict__.pop("first_layers", None)
        super().bind(target)
        self.sliding_window = None  # no engine gives the adapter the target's

    def feature(self, features: Features) -> Tensor:
        """See ``EagleHead``: the hidden states after the first layers."""
        return features.aux.flatten(0, 1).to(self.adapter.norm.weight.dtype)

    def read(self, tokens: Tensor, feature: Tensor, attends: Attends) -> Output:
        """See ``EagleHead``; the first layers have read the tokens, and nothing is embedded."""
        return run_layer(self, self._layer, feature, feature, attends)

    def _layer(self, embedded: Tensor, feature: Tensor, attends: Attends) -> Output:
        hidden = self.adapter(feature, *attends)
        return Output(hidden, hidden)

    def _unroll(self, alignment: Alignment, feature: Tensor, decay: StepDecay) -> list[Step]:
        """The one step: where EAGLE's first sees feature r and token r + 1, which the target emitted, the first layers
        have read that token too, and the adapter continues from position r + 1."""
        supervised = alignment.supervised[0]
        # Where nothing is to be learned one position is read all the same, see ``align``.
        asked = supervised + 1 if len(supervised) else alignment.positions.new_zeros(1)  # [n]
        cos, sin = (table[alignment.positions] for table in self.rotary(alignment.length, feature))  # [R, d]
        keys = UnrolledKeys(alignment.documents, asked)
        hidden, _ = self.read(alignment.tokens, feature, (Attend(cos, sin, keys, asked),))
        shares = None if alignment.shares is None else alignment.shares[0]
        count = len(supervised)
        return [Step(hidden[:count], asked[:count], decay.weight(0), total=alignment.counts[0], shares=shares)]

    def activation_bytes(self, tokens: int, element: int) -> float:
        """See ``Drafter``: the two norms' inputs and outputs, and the attention."""
        config = self.layer_config
        heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads + 4  # queries twice; cosines and sines
        return float((4 * config.hidden_size + heads * config.head_dim) * tokens * element)

    def drafting(self, rows: int, capacity: int) -> "KangarooDrafting":
        """See ``Drafter``."""
        return KangarooDrafting(self, rows, capacity)


class Adapter(nn.Module):
    """An attention between two norms, beside the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, stream: Tensor, attend: Attend) -> Tensor:
        """The stream ``[N, H]`` -> what the LM head reads, of the queries, ``[n, H]``."""
        return self.norm(stream[attend.queries] + self.self_attn(self.input_layernorm(stream), attend))


class KangarooDrafting(EagleDrafting):
    """The adapter's keys and values of each text but its last token, which is read when a draft begins."""

    shares_cache = True

    def __init__(self, drafter: Kangaroo, rows: int, capacity: int) -> None:
        super().__init__(drafter, rows, capacity)
        self.drafter = drafter
        self.unread = torch.zeros(rows, dtype=torch.int64, device=drafter.target.device)

    def borrow(self, cache: StaticCache) -> None:
        """See ``Drafting``."""
        self.target_cache = cache

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """Append the keys of what the target has read; they replace those of what was drafted there."""
        reading = Pass.text(tokens, texts.lengths - 1, texts.longest - 1, simple=True)
        self.cache.begin(reading, texts.first)
        stream = self.drafter.feature(features)
        cos, sin = self.drafter.rotary(reading.size, stream)
        here, adapter = reading.positions.flatten(), self.drafter.adapter
        key_value = adapter.self_attn.key_value(adapter.input_layernorm(stream), cos[here], sin[here])
        key, value = (part.unflatten(0, tokens.shape).transpose(1, 2) for part in key_value)  # [B, Hk, n, d]
        self.cache.update(key, value, 0)
        self.unread[texts.first : texts.first + len(tokens)] = tokens.gather(1, counts[:, None] - 1)[:, 0]

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        last = self.unread[: len(texts.lengths), None]
        return self._continued(Pass.text(last, texts.lengths - 1, texts.longest - 1, simple=len(last) == 1))[:, 0]

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """See ``LevelDrafting``."""
        positions = (texts.lengths + (level.depth - 1))[:, None].expand_as(level.tokens)
        reading = Pass.level(level.tokens, positions, texts.lengths, texts.longest, level.seen, level.before)
        return self._continued(reading)

    def _continued(self, reading: Pass) -> Tensor:
        """Logits ``[B, m, V]`` after the tokens that the first layers and the adapter read."""
        stream = self.drafter.first_layers.step(reading, self.target_cache).last  # [B, m, H]
        return self._read(reading, stream.flatten(0, 1).to(self.drafter.adapter.norm.weight.dtype), 0, None)[1]

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        super().drop(row, last, length)
        self.unread[row] = self.unread[last]
