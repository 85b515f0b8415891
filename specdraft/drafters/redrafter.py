"""ReDrafter (2403.09919): a recurrent state of the tokens since, beside the target's last hidden state.

n = positions of a step, m = nodes of a level, H = hidden size, E = width of the exit, Vd = draft vocabulary.

    s = SiLU(W e(token) + U s + b), zeros before the first token        (section 3.2)
    logits = projection of residual layers x + SiLU(Lx + c) on x = [hidden state, s], or on an input projection of that

- One cell and one projection serve every step, so that a draft may be longer than in training.
- The embedding is borrowed, never copied, and read as a multiple of itself: the power of two that brings it nearest to
  unit RMS. The embedded target's rows are 25 times smaller than its hidden states, and what a cell hardly hears it
  learns late. A power of two changes no digit, so that the published layout, which has no such number, holds ``W``
  multiplied by it and says the same to the last bit.
- The paper's beam search with merged prefixes walks as EAGLE-2's dynamic tree does: at each level the w likeliest
  continuations of the w likeliest paths go on. Beams keep the w paths that reach the last level; the tree keeps the
  likeliest nodes of all that were seen, of any level (``decoding/shape=dynamic_tree``)."""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from specdraft.decoding.compilation import Compilable
from specdraft.decoding.passes import Texts
from specdraft.drafters.alignment import Alignment, StepDecay
from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.last_state import LastState, LastStateDrafting, ResidualBlock
from specdraft.drafters.objective import DraftHead
from specdraft.errors import UserError
from specdraft.onednn import plain
from specdraft.targets import Target


class ReDrafter(LastState, family="redrafter"):
    """The cell ``rnn_w``, ``rnn_u``, where E is not 2H an ``input_proj``, ``block`` and ``lm_head``."""

    training_options = frozenset(
        {"ttt_steps", "step_decay", "sample_positions", "sequence_mean", "confidence_smoothing", "divergence"}
    )

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        draft_vocab_size: int,
        exit_size: int | None = None,
        num_layers: int = 2,
        embedding_scale: float = 1.0,
        ttt_steps: int = 5,
        step_decay: float = 0.8,
        sample_positions: bool = False,
        sequence_mean: bool = False,
        confidence_smoothing: float | None = None,
        divergence: str | dict[str, Any] = "forward_kl",
    ) -> None:
        """Build with zero residual layers, a random cell, and a random projection to ids 0..Vd-1 (until
        ``set_draft_vocabulary``). ``exit_size``: E, None is 2H. ``embedding_scale``: what embeddings are multiplied by,
        a power of two. Step i of ``ttt_steps`` weighs ``step_decay**i`` in the loss, or learns from such a share of the
        positions (``sample_positions``); see ``LastState`` for the rest. Raises UserError as that does, for a size, a
        number of layers or of steps below 1, a scale that is no power of two, and a decay that cannot be sampled."""
        arguments = constructor_arguments(locals())
        width = 2 * hidden_size if exit_size is None else exit_size
        for name, value in (("exit_size", width), ("num_layers", num_layers), ("ttt_steps", ttt_steps)):
            if value < 1:
                raise UserError(f"{name} is {value}: expected at least 1")
        if embedding_scale <= 0 or math.frexp(embedding_scale)[0] != 0.5:
            raise UserError(f"embedding_scale is {embedding_scale}: expected a power of two, which rounds nothing")
        decay, sizes = StepDecay(step_decay, sample_positions), (hidden_size, vocab_size, draft_vocab_size)
        super().__init__(*sizes, ttt_steps, decay, sequence_mean, confidence_smoothing, divergence)
        self._arguments = arguments
        self.ttt_steps, self.embedding_scale = ttt_steps, embedding_scale
        self.decoding_pass = Compilable(self._logits, type(self).__name__)
        self.rnn_w = nn.Linear(hidden_size, hidden_size, bias=False)
        self.rnn_u = nn.Linear(hidden_size, hidden_size)
        self.input_proj = None if width == 2 * hidden_size else nn.Linear(2 * hidden_size, width)
        if self.input_proj is not None:  # the hidden state, and of the recurrent one what there is room for
            nn.init.eye_(self.input_proj.weight)
            nn.init.zeros_(self.input_proj.bias)
        self.block = ResidualBlock(width, num_layers)
        self.lm_head = DraftHead(width, draft_vocab_size, bias=False)

    @classmethod
    def for_target(cls, target: Target, draft_vocabulary: Tensor | None = None, **options: Any) -> Self:
        """See ``LastState``; the scale is that of the target's embedding."""
        return super().for_target(target, draft_vocabulary, **{"embedding_scale": _scale(target)} | options)

    @property
    def projections(self) -> list[DraftHead]:
        """See ``LastState``."""
        return [self.lm_head]

    def read(self, tokens: Tensor, state: Tensor) -> Tensor:
        """The state ``[n, H]`` after ``tokens [n]``, from that before them."""
        embedded = embedding(tokens, self.target.embedding_weight).to(state.dtype) * self.embedding_scale
        return silu(self.rnn_w(embedded) + self.rnn_u(state))

    def hidden(self, last: Tensor, state: Tensor) -> Tensor:
        """What is projected, ``[n, E]``, of hidden states and recurrent ones, ``[n, H]`` each."""
        given = torch.cat([last, state], dim=-1)
        return self.block(given if self.input_proj is None else self.input_proj(given))

    def unrolled(self, last: Tensor, alignment: Alignment) -> list[Tensor]:
        """See ``LastState``; the text's own tokens are read."""
        before = alignment.supervised[0]
        state = last.new_zeros((len(before), self.hidden_size), dtype=self.dtype)
        hidden = []
        for step, at in enumerate(alignment.supervised):
            state = state[torch.searchsorted(before, at)]  # positions only ever get fewer
            state = self.read(alignment.tokens[at + 1 + step], state)
            hidden.append(self.hidden(last[at].to(self.dtype), state))  # [n, E]
            before = at
        return hidden

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """Every matrix at each step, for its share of the positions."""
        matrices = sum(parameter.numel() for parameter in self.parameters() if parameter.ndim == 2)
        used = matrices * sum(self.decay.share(step) for step in range(self.ttt_steps))
        return 2.0 * used, 4.0 * used

    def activation_bytes(self, tokens: int, element: int) -> float:
        """Those of a step, for every one."""
        steps = sum(self.decay.share(step) for step in range(self.ttt_steps))
        return super().activation_bytes(tokens, element) * steps

    def _logits(self, last: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.read(tokens, state)
        return self.lm_head(self.hidden(last, state)), state

    def drafting(self, rows: int, capacity: int) -> "ReDrafterDrafting":
        """See ``Drafter``."""
        return ReDrafterDrafting(self, rows)


class ReDrafterDrafting(LastStateDrafting):
    """A step of the cell for each level, every node behind its own parent."""

    _state: Tensor  # [B, m, H], of the nodes of the level that is read

    def __init__(self, drafter: ReDrafter, rows: int) -> None:
        super().__init__(drafter, rows)
        self.drafter = drafter

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        batch = len(texts.lengths)
        return self._read(self.token[:batch, None], torch.zeros_like(self.last[:batch, None]))[:, 0]

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """See ``LevelDrafting``."""
        above = level.parents[..., None].expand(-1, -1, self._state.shape[-1])
        return self._read(level.tokens, self._state.gather(1, above))

    def _read(self, tokens: Tensor, above: Tensor) -> Tensor:
        """The logits ``[B, m, Vd]`` after ``tokens [B, m]``, behind the states ``above [B, m, H]``."""
        last = self.last[: len(tokens), None].expand_as(above).flatten(0, 1)
        given = last, tokens.flatten(), above.flatten(0, 1)
        logits, state = self.drafter.decoding_pass(tokens.shape[1], *given)
        self._state = state.unflatten(0, tokens.shape)
        return logits.unflatten(0, tokens.shape)


def _scale(target: Target) -> float:
    """The power of two that brings the embedding nearest to unit RMS; 1 of a target without weights, or of zeros."""
    weight = plain(target.embedding_weight.detach())
    rms = 0.0 if weight.is_meta else float(weight.float().pow(2).mean().sqrt())
    return 2.0 ** -round(math.log2(rms)) if rms > 0 else 1.0
