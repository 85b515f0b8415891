"""Heads on the target's last hidden state: what Medusa and Hydra share.

R = positions of the flat batch, n = positions of a head, m = nodes of a level, H = hidden size, Vd = draft vocabulary.

- Head i predicts token r+2+i from position r's hidden state, so that k heads draft k levels from one target pass.
- A head is a block of residual layers, zero-initialized and so the identity at first, and a projection.
- One ``hidden`` serves training and decoding."""

from abc import abstractmethod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from specdraft.decoding.compilation import Compilable
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.alignment import Alignment, StepDecay
from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.last_state import LastState, LastStateDrafting, ResidualBlock
from specdraft.drafters.objective import DraftHead
from specdraft.errors import UserError


class Heads(LastState):
    """``num_heads`` heads; a subclass says what each reads. Parameters carry vLLM's names:
    ``blocks.{head}.layers.{layer}.{weight,bias}`` and ``lm_heads.{head}.weight``."""

    training_options = frozenset(
        {"head_decay", "sample_positions", "sequence_mean", "confidence_smoothing", "divergence"}
    )

    reads_path: ClassVar[bool]
    """Whether ``hidden`` reads the path, so that nodes of one level may be followed by different tokens."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        draft_vocab_size: int,
        num_heads: int = 5,
        num_layers: int = 1,
        head_decay: float = 0.8,
        sample_positions: bool = False,
        sequence_mean: bool = False,
        confidence_smoothing: float | None = None,
        divergence: str | dict[str, Any] = "forward_kl",
    ) -> None:
        """Build with zero blocks and random projections to ids 0..Vd-1 (until ``set_draft_vocabulary``). Head i weighs
        ``head_decay**i`` in the loss, or learns from such a share of the positions (``sample_positions``); see
        ``LastState`` for the rest. Raises UserError as that does, for no head or layer, and for a decay that cannot be
        sampled."""
        arguments = constructor_arguments(locals())
        for name, value in (("num_heads", num_heads), ("num_layers", num_layers)):
            if value < 1:
                raise UserError(f"{name} is {value}: expected at least 1")
        decay = StepDecay(head_decay, sample_positions)
        sizes = (hidden_size, vocab_size, draft_vocab_size)
        super().__init__(*sizes, num_heads, decay, sequence_mean, confidence_smoothing, divergence)
        self._arguments = arguments
        self.num_heads = num_heads
        self.decoding_pass = Compilable(self._logits, type(self).__name__)
        self.blocks = nn.ModuleList(
            ResidualBlock(hidden_size, num_layers, self.num_read(head)) for head in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(DraftHead(hidden_size, draft_vocab_size, bias=False) for _ in range(num_heads))

    @staticmethod
    @abstractmethod
    def num_read(head: int) -> int:
        """How many vectors ``[H]`` the first layer of a head reads."""

    @abstractmethod
    def hidden(self, head: int, last: Tensor, path: Tensor) -> Tensor:
        """What a head projects, ``[n, H]``. last: ``[n, H]``. path: ``[n, head + 1]``, tokens from the emitted on."""

    @property
    def projections(self) -> list[DraftHead]:
        """See ``LastState``."""
        return cast("list[DraftHead]", list(self.lm_heads))

    def unrolled(self, last: Tensor, alignment: Alignment) -> list[Tensor]:
        """See ``LastState``; a step is a head."""
        since = torch.arange(1, 1 + self.num_heads, device=last.device)
        hidden = []
        for head, at in enumerate(alignment.supervised):
            path = alignment.tokens[at[:, None] + since[: head + 1]]  # [n, head + 1]
            hidden.append(self.hidden(head, last[at].to(self.dtype), path))  # [n, H]
        return hidden

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """The matrices of each head, for its share of the positions."""
        pairs = enumerate(zip(self.blocks, self.lm_heads, strict=True))
        used = ((head, p) for head, parts in pairs for part in parts for p in part.parameters() if p.ndim == 2)
        matrices = sum(self.decay.share(head) * parameter.numel() for head, parameter in used)
        return 2.0 * matrices, 4.0 * matrices

    def _logits(self, head: int, last: Tensor, path: Tensor) -> tuple[Tensor]:
        return (self.lm_heads[head](self.hidden(head, last, path)),)

    def drafting(self, rows: int, capacity: int) -> "HeadsDrafting":
        """See ``Drafter``."""
        return HeadsDrafting(self, rows)


class HeadsDrafting(LastStateDrafting):
    """A pass of a head for each level, and as many levels as heads."""

    _path: Tensor  # [B, m, levels], of the nodes of the level that is read

    def __init__(self, heads: Heads, rows: int) -> None:
        super().__init__(heads, rows)
        self.heads = heads

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """See ``Drafting``."""
        return super().draft(texts, shape.truncate(self.heads.num_heads), sampling, chance)

    def first(self, texts: Texts) -> Tensor:
        """See ``LevelDrafting``."""
        self._path = self.token[: len(texts.lengths), None, None]
        return self._logits(0)[:, 0]

    def extend(self, texts: Texts, level: Level) -> Tensor:
        """See ``LevelDrafting``."""
        above = level.parents[..., None].expand(-1, -1, level.depth)
        self._path = torch.cat([self._path.gather(1, above), level.tokens[..., None]], dim=2)
        return self._logits(level.depth)

    def _logits(self, head: int) -> Tensor:
        """``[B, m, Vd]``; where the path is not read, one answer serves all nodes of a request."""
        batch, nodes, _ = self._path.shape
        path = self._path if self.heads.reads_path else self._path[:, :1]
        last = self.last[:batch, None].expand(-1, path.shape[1], -1)
        (logits,) = self.heads.decoding_pass(head, head, last.flatten(0, 1), path.flatten(0, 1))
        return logits.unflatten(0, path.shape[:2]).expand(-1, nodes, -1)
