"""EAGLE-3 (2503.01840): three fused hidden states of the target, and a projection of its own.

R = positions of the flat batch, N = positions of a pass, n = queries, H = hidden size (the target's), V / Vd = target /
draft vocabulary. The unrolled steps, the layer and its attention are in ``forward.py``.

- Three auxiliary hidden states of the target, concatenated, go through ``fc`` to one feature g.
- The layer's attention reads ``[norm(embedding of the next token), norm(g)]``, 2H wide; the residual stream is g.
- The layer's output is the next feature; normed, it is what ``lm_head`` projects to the draft vocabulary.

Parameter names are those that serving engines load."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdraft.drafters.base import TrainingLoss, constructor_arguments
from specdraft.drafters.eagle.forward import Attend, FusionLayer, Output
from specdraft.drafters.eagle.head import EagleHead, initialize, shape_of
from specdraft.drafters.objective import DraftHead, call_with_weights, objective
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.losses.chunked import Step, Teacher
from specdraft.onednn import plain
from specdraft.targets import Features, Target


class Eagle3(DraftVocabulary, EagleHead):
    """The EAGLE-3 head. ``fc_norm`` (a norm per auxiliary state) and ``norm_output`` (the head feeds back its normed
    output) are EAGLE-3.1's options; an engine must be told of both."""

    reads_every_last = False

    def __init__(
        self,
        draft_vocab_size: int,
        layers: Sequence[int],
        fc_norm: bool = False,
        norm_output: bool = False,
        **shared: Any,
    ) -> None:
        """Build with random weights; ``shared`` is what every ``EagleHead`` takes. Raises UserError as it does, and for
        a draft vocabulary (0..Vd-1 until ``set_draft_vocabulary``) larger than the vocabulary."""
        arguments = constructor_arguments(locals())
        super().__init__(**shared)
        self._arguments |= arguments
        self.register_vocabulary(self.vocab_size, draft_vocab_size)
        self.layers = tuple(layers)
        self.norm_output = norm_output
        hidden_size, epsilon = self.layer_config.hidden_size, self.layer_config.rms_norm_eps
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(hidden_size, epsilon) for _ in self.layers) if fc_norm else None
        self.fc = nn.Linear(len(self.layers) * hidden_size, hidden_size, bias=False)
        self.midlayer = FusionLayer(self.layer_config)
        self.norm = LlamaRMSNorm(hidden_size, epsilon)
        self.lm_head = DraftHead(hidden_size, draft_vocab_size, bias=False)
        self.apply(initialize)

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        **options: Any,
    ) -> "Eagle3":
        """A head shaped like one layer of ``target``; its projection starts from the target's own rows.
        draft_vocabulary: ascending target ids ``[Vd]``; None for the whole vocabulary."""
        size = target.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
        layers = target.check_layers(target.default_layers() if layers is None else layers)
        head = cls(size, layers, **shape_of(target, intermediate_size), **options)
        if draft_vocabulary is not None:
            head.set_draft_vocabulary(draft_vocabulary)
        rows = plain(target.head.weight.detach())[head.draft_ids.to(target.device)]
        head.lm_head.weight.data.copy_(rows * target.logit_scale)  # engines apply none to a head
        head.bind(target)
        return head

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """The fusion runs in the first step alone, and its inputs need no gradient."""
        forward, backward = super().training_flops(sequence_length)
        fusion, later = 2.0 * self.fc.weight.numel(), self.passes - 1
        return forward - later * fusion, backward - (2 * later + 1) * fusion

    def feature(self, features: Features) -> Tensor:
        """See ``EagleHead``."""
        aux = features.aux.flatten(0, 1).to(self.fc.weight.dtype)  # [R, 3H]
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), dim=-1)  # [R, H] each
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)  # [R, 3H]
        return self.fc(aux)  # [R, H]

    def _layer(self, embedded: Tensor, feature: Tensor, attend: Attend) -> Output:
        output = self.midlayer(embedded, feature, attend)  # [n, H]
        normed = self.norm(output)  # [n, H]
        return Output(normed, normed if self.norm_output else output)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``EagleHead``."""
        return self.lm_head(hidden)  # [n, Vd]

    def _loss(self, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        return call_with_weights([self.lm_head], lambda weights: objective(weights, teacher, steps, self.divergence))
