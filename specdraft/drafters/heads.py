"""Heads on the target's last hidden state: what Medusa and Hydra share.

R = positions of the flat batch, n = positions of a head, m = nodes of a level, H = hidden size, Vd = draft vocabulary.

- Position r's hidden state is the one after the final norm, from which the target itself predicts token r+1. Head i
  predicts token r+2+i from it, so that k heads draft k levels from one target pass.
- A head is a block of residual layers, zero-initialized and so the identity at first, and a projection that starts from
  the target's own rows: an untrained head says what the target says at its position (2401.10774, section 2.1).
- The logit scale of a target (Cohere, Granite) is part of those first rows, because serving engines apply none to a
  head. A soft-cap cannot be part of a linear projection; it keeps the order of tokens, and training fits the rest.
- One ``hidden`` serves training and decoding."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from specdraft.decoding.compilation import Compilable
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import ForcedPath, Shape
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.alignment import StepDecay, align, count_supervised
from specdraft.drafters.base import Drafter, TrainingLoss, constructor_arguments
from specdraft.drafters.confidence import check_smoothing, weigh_by_confidence
from specdraft.drafters.draft_tree_builder import Level
from specdraft.drafters.drafting import LevelDrafting
from specdraft.drafters.objective import DraftHead, call_with_weights, objective
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, Teacher
from specdraft.losses.divergence import divergence as find_divergence
from specdraft.onednn import plain
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch


class ResidualBlock(nn.Module):
    """Layers x + SiLU(Wx + b); the first may read more than the residual stream x."""

    def __init__(self, hidden_size: int, num_layers: int, num_read: int = 1) -> None:
        """The first layer reads ``num_read`` vectors of ``hidden_size``, of which the first is the stream."""
        super().__init__()
        self.hidden_size = hidden_size
        widths = [num_read * hidden_size] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.Linear(width, hidden_size) for width in widths)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, read: Tensor) -> Tensor:
        """``[n, num_read * H]`` -> ``[n, H]``."""
        stream = read[..., : self.hidden_size]
        for layer in self.layers:
            read = stream = stream + nn.functional.silu(layer(read))
        return stream


class Heads(DraftVocabulary, Drafter):
    """``num_heads`` heads; a subclass says what each reads. Parameters carry vLLM's names:
    ``blocks.{head}.layers.{layer}.{weight,bias}`` and ``lm_heads.{head}.weight``, with d2t and t2d beside them where
    the vocabulary is pruned."""

    target: Target
    training_options = frozenset(
        {"head_decay", "sample_positions", "sequence_mean", "confidence_smoothing", "divergence"}
    )
    reads_every_last = False

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
        ``head_decay**i`` in the loss, or learns from such a share of the positions (``sample_positions``), or weighs
        what the draft's confidence says (``confidence_smoothing``, see ``confidence.py``). ``sequence_mean``: documents
        count alike, not positions. Raises UserError for no head or layer, an unknown divergence, a decay that cannot be
        sampled, no such smoothing, or a draft vocabulary larger than the vocabulary."""
        arguments = constructor_arguments(locals())
        super().__init__()
        for name, value in (("num_heads", num_heads), ("num_layers", num_layers)):
            if value < 1:
                raise UserError(f"{name} is {value}: expected at least 1")
        self._arguments = arguments
        self.hidden_size, self.num_heads = hidden_size, num_heads
        check_smoothing(confidence_smoothing, sample_positions)
        self.decay = StepDecay(head_decay, sample_positions)
        self.sequence_mean, self.confidence_smoothing = sequence_mean, confidence_smoothing
        self.divergence = find_divergence(divergence)
        self.decoding_pass = Compilable(self._logits, type(self).__name__)
        self.register_vocabulary(vocab_size, draft_vocab_size, persistent=draft_vocab_size < vocab_size)
        self.blocks = nn.ModuleList(
            ResidualBlock(hidden_size, num_layers, self.num_read(head)) for head in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(DraftHead(hidden_size, draft_vocab_size, bias=False) for _ in range(num_heads))

    @classmethod
    def for_target(cls, target: Target, draft_vocabulary: Tensor | None = None, **options: Any) -> Self:
        """Heads for ``target``; ``draft_vocabulary``: ascending target ids ``[Vd]``, None for the whole vocabulary."""
        size = target.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
        heads = cls(target.hidden_size, target.vocab_size, size, **options)
        if draft_vocabulary is not None:
            heads.set_draft_vocabulary(draft_vocabulary)
        rows = plain(target.head.weight.detach())[heads.draft_ids.to(target.device)] * target.logit_scale
        for weight in heads.lm_heads.parameters():
            weight.data.copy_(rows)
        heads.bind(target)
        return heads

    @staticmethod
    @abstractmethod
    def num_read(head: int) -> int:
        """How many vectors ``[H]`` the first layer of a head reads."""

    @abstractmethod
    def hidden(self, head: int, last: Tensor, path: Tensor) -> Tensor:
        """What a head projects, ``[n, H]``. last: ``[n, H]``. path: ``[n, head + 1]``, the tokens from the emitted one
        on."""

    def count_supervised(self, batch: Batch) -> Tensor:
        """Of every head."""
        return count_supervised(batch, self.num_heads, self.sequence_mean)

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """Per head the mean divergence over its supervised positions, times ``head_decay**head``, or in training an
        estimate of it from sampled ones; step s of the metrics is head s. The teacher of head i at position r is the
        target's distribution at r+1+i."""
        self.bind(target)
        decay = self.decay if self.training else StepDecay(self.decay.base)
        alignment = align(batch, self.num_heads, decay, self.sequence_mean)
        last = features.last.flatten(0, 1)  # [R, H]
        since = torch.arange(1, 1 + self.num_heads, device=last.device)
        steps = []
        for head, at in enumerate(alignment.supervised):  # an empty one stays: other ranks wait for its gradient
            path = alignment.tokens[at[:, None] + since[: head + 1]]  # [n, head + 1]
            hidden = self.hidden(head, last[at].to(self.dtype), path)  # [n, H]
            total = alignment.counts[head] if totals is None else totals[head]
            shares = None if alignment.shares is None else alignment.shares[head]
            steps.append(Step(hidden, at + 1 + head, decay.weight(head), head, total, shares))
        labels = alignment.tokens[1 : 1 + len(last)]
        teacher = Teacher(last, target.logits, self.vocabulary.ids, labels)
        projections = cast("list[DraftHead]", list(self.lm_heads))

        def loss(weights: list[Tensor]) -> TrainingLoss:
            weighed = steps
            if self.confidence_smoothing is not None:
                weighed = weigh_by_confidence(weights, teacher, steps, self.confidence_smoothing)
            return objective(weights, teacher, weighed, self.divergence)

        return call_with_weights(projections, loss)

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

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype


class HeadsDrafting(LevelDrafting):
    """Of each request the newest position's hidden state ``[rows, H]``, and the token ``[rows]`` that was emitted from
    it; the heads see no other."""

    _path: Tensor  # [B, m, levels], of the nodes of the level that is read

    def __init__(self, heads: Heads, rows: int) -> None:
        self.heads, self.vocabulary = heads, heads.vocabulary
        device = next(heads.parameters()).device
        self.last = torch.zeros(rows, heads.hidden_size, dtype=heads.dtype, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)

    def begin(self, row: int, first_token: int) -> None:
        """See ``Drafting``."""

    def advance(self, texts: Texts, tokens: Tensor, counts: Tensor, features: Features) -> None:
        """A head drafts from the newest position alone."""
        rows = slice(texts.first, texts.first + len(tokens))
        newest = (counts - 1)[:, None]
        self.last[rows] = features.take(newest).last[:, 0].to(self.last.dtype)
        self.token[rows] = tokens.gather(1, newest)[:, 0]

    def draft(self, texts: Texts, shape: Shape | ForcedPath, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        """A pass of a head for each level."""
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

    def drop(self, row: int, last: int, length: int) -> None:
        """See ``Drafting``."""
        self.last[row], self.token[row] = self.last[last], self.token[last]
