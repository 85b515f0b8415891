"""DFlash (2602.06036): all tokens of a draft from one pass over a block of masks.

R = positions of the flat batch, A = anchors, S = slots of a block, N = slots of a pass, H = hidden size (the target's),
V / Vd = target / draft vocabulary.

- Hidden states of several of the target's layers, concatenated, go through ``fc`` and a norm to the context.
- A block is the last emitted token, the anchor, and after it masks. Each of its slots attends, in every layer, to the
  context before the anchor and to all slots of the block; slot j says what the j-th token after the anchor is.
- So a draft costs one pass however long it is, and its tokens know nothing of each other: what is drafted at a slot is
  a marginal, and branches of a tree share it.
- Embedding and vocabulary projection are the target's, and frozen. Parameters carry the names that engines load, but
  for ``blocks``, which are their ``layers``.

What a slot says may be corrected by what was drafted before it: ``sequential.py``.

In training blocks begin at a random share of the positions (section 3.3), each where ``alignment.py`` says a draft may:
the anchor of position r is token r+1, and the s-th slot that drafts is what the other families call step s."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specdraft.decoding.compilation import Compilable
from specdraft.drafters.alignment import Alignment, StepDecay, align, count_supervised
from specdraft.drafters.base import Drafter, TrainingLoss, constructor_arguments
from specdraft.drafters.confidence import check_smoothing, weigh_by_confidence
from specdraft.drafters.dflash.block_attention import Blocks
from specdraft.drafters.dflash.drafting import BlockDrafting, forward
from specdraft.drafters.dflash.layer import Angles, Attention, BlockLayer
from specdraft.drafters.layers import RMSNorm, initialize, shape_of
from specdraft.drafters.mask_token import check_mask_token
from specdraft.drafters.mask_token import mask_token as mask_token_of
from specdraft.drafters.objective import DraftHead, call_with_weights, objective
from specdraft.drafters.rotary import RotaryTable
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, Teacher
from specdraft.losses.divergence import divergence as divergence_of
from specdraft.onednn import plain
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch


class Slots(NamedTuple):
    """The slots of A blocks that draft K tokens. hidden: ``[A, K, H]`` normed. before: ``[A, K]`` the text's token
    before the one that each slot drafts. rows: per step which of the blocks learn from it, ``[n]``."""

    hidden: Tensor
    before: Tensor
    rows: list[Tensor]


class DFlash(DraftVocabulary, Drafter):
    """The block drafter; vLLM's method ``dflash`` loads it."""

    first_slot: ClassVar[int] = 1
    """The slot that drafts the token after the anchor."""

    target: Target
    reads_every_last = False
    training_options = frozenset(
        {"num_anchors", "step_decay", "sequence_mean", "confidence_smoothing", "divergence", "projection"}
    )

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        vocab_size: int,
        rms_norm_eps: float,
        rope_parameters: Mapping[str, Any],
        max_position_embeddings: int,
        draft_vocab_size: int,
        layers: Sequence[int],
        mask_token: int,
        hidden_act: str = "silu",
        num_layers: int = 5,
        block_size: int = 8,
        causal: bool = False,
        num_anchors: int | None = None,
        step_decay: float = 0.8,
        sequence_mean: bool = False,
        confidence_smoothing: float | None = None,
        divergence: str | Mapping[str, Any] = "forward_kl",
        projection: str = "frozen",
    ) -> None:
        """Build with random weights. ``block_size``: slots; the longest draft has ``first_slot`` tokens less.
        ``causal``: slots see those before them in the block alone. ``num_anchors``: blocks that a sequence learns from,
        drawn at random, on average; None for all positions where a draft may begin. Token s weighs ``step_decay**s``
        in the loss, or what the draft's confidence says (``confidence_smoothing``, see ``confidence.py``);
        ``sequence_mean``: documents count alike, not positions. ``projection``, to the draft vocabulary, stays as the
        target's own rows (frozen), or starts as they are and is trained (target).
        Raises UserError for a block without a mask, no layer or anchor, a mask that is no token, an unknown divergence
        or projection, no such smoothing, and a draft vocabulary larger than the vocabulary."""
        arguments = constructor_arguments(locals())
        super().__init__()
        least = {
            "block_size": (block_size, 1 + self.first_slot),
            "num_layers": (num_layers, 1),
            "num_anchors": (num_anchors, 1),
        }
        for name, (given, smallest) in least.items():
            if given is not None and given < smallest:
                raise UserError(f"model.drafter.{name} is {given}: expected at least {smallest}")
        check_mask_token(mask_token, vocab_size)
        if projection not in ("frozen", "target"):
            raise UserError(f"model.drafter.projection is {projection!r}: expected frozen or target")
        check_smoothing(confidence_smoothing, sample_positions=False)
        self._arguments = arguments
        self.layers, self.mask_token, self.block_size, self.causal = tuple(layers), mask_token, block_size, causal
        self.whole_drafts = None if causal else self.num_drafts
        self.num_layers, self.num_anchors, self.step_decay = num_layers, num_anchors, step_decay
        self.sequence_mean, self.confidence_smoothing = sequence_mean, confidence_smoothing
        self.divergence = divergence_of(divergence)
        self.register_vocabulary(vocab_size, draft_vocab_size)
        of_layer = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
        of_layer += ["rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act"]
        self.layer_config = LlamaConfig(**{name: arguments[name] for name in of_layer})
        self.rotary = RotaryTable(self.layer_config)
        self.fc = nn.Linear(len(self.layers) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, rms_norm_eps)
        self.blocks = nn.ModuleList(BlockLayer(self.layer_config) for _ in range(num_layers))
        self.norm = RMSNorm(hidden_size, rms_norm_eps)
        self.lm_head = DraftHead(hidden_size, draft_vocab_size, bias=False)
        self.apply(initialize)
        self.lm_head.weight.requires_grad_(projection != "frozen")
        self.decoding_pass = Compilable(partial(forward, self), type(self).__name__)

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        mask_token: int | None = None,
        **options: Any,
    ) -> Self:
        """Layers shaped like one of ``target``. draft_vocabulary: ascending target ids ``[Vd]``; None for the whole
        vocabulary. mask_token: whose embedding stands at what is to be drafted; None for one that no text has. Raises
        UserError for layers that the target has not."""
        size = target.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
        shape = shape_of(target, intermediate_size) | {"draft_vocab_size": size}
        shape["layers"] = target.check_layers(target.default_layers() if layers is None else layers)
        shape["mask_token"] = mask_token_of(target.tokenizer, target.vocab_size) if mask_token is None else mask_token
        drafter = cls(**shape, **options)
        if draft_vocabulary is not None:
            drafter.set_draft_vocabulary(draft_vocabulary)
        rows = plain(target.head.weight.detach())[drafter.draft_ids.to(target.device)]
        drafter.lm_head.weight.data.copy_(rows * target.logit_scale)  # engines apply none to a head
        drafter.bind(target)
        return drafter

    @property
    def num_drafts(self) -> int:
        """Tokens of the longest draft."""
        return self.block_size - self.first_slot

    @property
    def decoder_layers(self) -> "list[BlockLayer]":
        """The layers in their order."""
        return cast("list[BlockLayer]", list(self.blocks))

    def context(self, aux: Tensor) -> Tensor:
        """Auxiliary states ``[R, a*H]`` -> what every layer projects to keys and values, ``[R, H]``."""
        return self.hidden_norm(self.fc(aux.to(self.fc.weight.dtype)))

    def context_keys(self, context: Tensor, angles: Angles) -> list[tuple[Tensor, Tensor]]:
        """Of every layer the context's keys and values, ``[R, Hk, d]``."""
        return [block.self_attn.key_value(context, *angles) for block in self.decoder_layers]

    def read(self, tokens: Tensor, angles: Angles, attentions: Sequence[Attention]) -> Tensor:
        """The one forward of training and decoding: slots with ``tokens [N]`` through all layers -> normed ``[N, H]``,
        which ``lm_head`` projects."""
        stream = nn.functional.embedding(tokens, self.target.embedding_weight).to(self.fc.weight.dtype)
        for block, attention in zip(self.decoder_layers, attentions, strict=True):
            stream = block(stream, angles, attention)
        return self.norm(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of normed hidden states ``[..., H]``, ``[..., Vd]``."""
        return self.lm_head(hidden)

    def masked(self, anchors: Tensor, num_slots: int) -> Tensor:
        """Blocks ``[n, S]`` that begin with the tokens ``[n]``."""
        return nn.functional.pad(anchors[:, None], (0, num_slots - 1), value=self.mask_token)

    def count_supervised(self, batch: Batch) -> Tensor:
        """Of every slot that drafts."""
        return count_supervised(batch, self.num_drafts, self.sequence_mean)

    def training_loss(
        self, batch: Batch, features: Features, target: Target, totals: Sequence[float] | None = None
    ) -> TrainingLoss:
        """Per slot the mean loss over its supervised positions, times ``step_decay**s``; where blocks are drawn, an
        estimate of that. Validation takes all."""
        self.bind(target)
        decay = StepDecay(self.step_decay, kept=self._kept(batch))
        alignment = align(batch, self.num_drafts, decay, self.sequence_mean)
        # Where there is no block, one that nobody asks about: under ZeRO-3 all ranks call the same modules.
        anchors = alignment.supervised[0] if len(alignment.supervised[0]) else batch.input_ids.new_zeros(1)
        hidden = self._blocks(anchors, features, alignment)[:, self.first_slot :]  # [A, K, H]
        before = alignment.tokens[anchors[:, None] + torch.arange(1, 1 + self.num_drafts, device=anchors.device)]
        steps, slots = [], Slots(hidden, before, [])
        for step, at in enumerate(alignment.supervised):
            rows = torch.searchsorted(anchors, at)  # [n]: they only ever get fewer
            total = alignment.counts[step] if totals is None else totals[step]
            shares = None if alignment.shares is None else alignment.shares[step]
            steps.append(Step(hidden[rows, step], at + 1 + step, decay.weight(step), total=total, shares=shares))
            slots.rows.append(rows)
        labels = alignment.tokens[1 : 1 + batch.input_ids.numel()]
        return self._learn(
            slots, steps, Teacher(features.last.flatten(0, 1), target.logits, self.vocabulary.ids, labels)
        )

    def _learn(self, slots: Slots, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        """The loss of all steps; ``slots`` is what a subclass may read beside them."""
        return call_with_weights(
            [self.lm_head],
            lambda weights: objective(weights, teacher, self._weigh(weights, teacher, steps), self.divergence),
        )

    def _weigh(self, weights: Sequence[Tensor], teacher: Teacher, steps: Sequence[Step]) -> Sequence[Step]:
        """The steps with the weights of the decay, or of the draft's confidence."""
        if self.confidence_smoothing is None:
            return steps
        return weigh_by_confidence(weights, teacher, steps, self.confidence_smoothing)

    def _kept(self, batch: Batch) -> float:
        """The share of the positions that blocks begin at."""
        if self.num_anchors is None or not self.training:
            return 1.0
        return min(1.0, self.num_anchors * len(batch.input_ids) / max(1, int(batch.before_learned().sum())))

    def _blocks(self, anchors: Tensor, features: Features, alignment: Alignment) -> Tensor:
        """The normed hidden states ``[A, S, H]`` of blocks at ``anchors [A]``."""
        context = self.context(features.aux.flatten(0, 1))  # [R, H]
        cos, sin = self.rotary(alignment.length + self.block_size, context)
        here = alignment.positions  # [R]
        keys = self.context_keys(context, Angles(cos[here], sin[here]))
        since = torch.arange(1, 1 + self.block_size, device=anchors.device)
        there = (here[anchors][:, None] + since).flatten()  # [A * S]
        blocks = Blocks(anchors, alignment.documents.whole(len(context)), self.block_size, self.causal)
        attentions = [lambda q, k, v, of=of: blocks.attend(q, of, (k, v)) for of in keys]
        tokens = self.masked(alignment.tokens[anchors + 1], self.block_size).flatten()
        hidden = self.read(tokens, Angles(cos[there], sin[there]), attentions)
        return hidden.unflatten(0, (-1, self.block_size))

    def share_kept(self, tokens: int) -> float:
        """Of the positions of a sequence of so many tokens, all supervised, that blocks begin at in training."""
        return min(1.0, (self.num_anchors or tokens) / tokens)

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """The fusion and the context's keys once a position, the layers and the projection for every slot."""
        config, attention = self.layer_config, self.decoder_layers[0].self_attn
        kept = self.share_kept(sequence_length)
        slots, projected = kept * self.block_size, kept * self.num_drafts
        keys = self.num_layers * (attention.k_proj.weight.numel() + attention.v_proj.weight.numel())
        layers = sum(matrix.numel() for matrix in self.blocks.parameters() if matrix.ndim == 2)
        seen = sequence_length / 2 + self.block_size  # on average
        scores = 2.0 * self.num_layers * slots * config.num_attention_heads * config.head_dim * seen
        fusion, head = self.fc.weight.numel(), projected * self.lm_head.weight.numel()
        forward = 2.0 * (fusion + keys + slots * layers + head) + 2 * scores
        trained = head if self.lm_head.weight.requires_grad else 0.0
        return forward, 2.0 * (fusion + 2 * keys + 2 * slots * layers + head + trained) + 4 * scores

    def activation_bytes(self, tokens: int, element: int) -> float:
        """The context and its keys once, and of every slot the layers' inputs."""
        config, hidden = self.layer_config, self.layer_config.hidden_size
        kept = self.share_kept(tokens)
        attention = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        per_slot = self.num_layers * (4 * hidden + 3 * attention + 2 * config.intermediate_size)
        context = (len(self.layers) + 2) * hidden + self.num_layers * 4 * config.num_key_value_heads * config.head_dim
        return float((kept * self.block_size * per_slot + context) * tokens * element)

    def drafting(self, rows: int, capacity: int) -> BlockDrafting:
        """See ``Drafter``."""
        return BlockDrafting(self, rows, capacity)
