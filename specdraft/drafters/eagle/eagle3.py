"""EAGLE-3 (2503.01840): three fused hidden states of the target, and a projection of its own.

R = positions of the flat batch, N = positions of a pass, n = queries, H = hidden size (the target's), V / Vd = target /
draft vocabulary. The unrolled steps, the layer and its attention are in ``forward.py``.

- Three auxiliary hidden states of the target, concatenated, go through ``fc`` to one feature g.
- The layer's attention reads ``[norm(embedding of the next token), norm(g)]``, 2H wide; the residual stream is g.
- The layer's output is the next feature; normed, it is what ``lm_head`` projects to the draft vocabulary.

Heads are published with other norms, layers and embeddings; ``Eagle3`` computes all that vLLM 0.32 serves, by the names
that vLLM and speculators have for them. Parameter names are those that serving engines load."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdraft.drafters.base import TrainingLoss, constructor_arguments
from specdraft.drafters.eagle.forward import Attends, FusionLayer, LaterLayer, Output
from specdraft.drafters.eagle.head import EagleHead
from specdraft.drafters.layers import RMSNorm, initialize, shape_of
from specdraft.drafters.objective import DraftHead, call_with_weights
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.errors import UserError
from specdraft.losses.chunked import Step, Teacher
from specdraft.onednn import plain
from specdraft.targets import Features, Target

PROJECTIONS = ("target", "frozen", "scratch")
NORMS = ("ones", "target", "frozen")


class Eagle3(DraftVocabulary, EagleHead):
    """The EAGLE-3 head. What its options change, an engine must be told of.

    - ``norm_before_fc``: a norm of the concatenated auxiliary states; ``fc_norm``: a norm of each of them.
    - ``norm_before_residual``: the residual stream begins with the normed feature.
    - ``norm_output``: the head feeds its normed output back. With ``fc_norm`` this is EAGLE-3.1.
    - ``qk_norm``: norms of queries and keys, as in Qwen3's layers; ``attention_bias``: biases of the four projections.
    - ``num_layers``: more than one are Llama (Qwen3) decoder layers after the first.
    - ``sliding_window``: how many positions attention sees, in every layer; None for all, or as ``bind`` says.
    - ``own_embedding``: an embedding of its own, which begins as the target's, instead of the target's."""

    reads_every_last = False
    quantizable = True
    training_options = EagleHead.training_options | {"projection", "output_norm"}

    def __init__(
        self,
        draft_vocab_size: int,
        layers: Sequence[int],
        fc_norm: bool = False,
        norm_output: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        qk_norm: bool = False,
        attention_bias: bool = False,
        num_layers: int = 1,
        sliding_window: int | None = None,
        own_embedding: bool = False,
        projection: str = "target",
        output_norm: str = "ones",
        **shared: Any,
    ) -> None:
        """Build with random weights; ``shared`` is what every ``EagleHead`` takes. ``projection``, to the draft
        vocabulary, starts as the target's own rows and is trained, stays as they are (frozen), or starts from scratch;
        ``output_norm``, before it, starts as ones or as the target's final norm and is trained, or stays as that is.
        Raises UserError as ``EagleHead`` does, for others of these, for a draft vocabulary (0..Vd-1 until
        ``set_draft_vocabulary``) larger than the vocabulary, no layer, biases beside ``qk_norm``, and a window that
        does not hold the steps of training."""
        arguments = constructor_arguments(locals())
        super().__init__(**shared)
        for name, given, known in (("projection", projection, PROJECTIONS), ("output_norm", output_norm, NORMS)):
            if given not in known:
                raise UserError(f"model.drafter.{name} is {given!r}: expected one of {', '.join(known)}")
        self._arguments |= arguments
        _check(num_layers, sliding_window, self.ttt_steps, qk_norm and attention_bias)
        self.register_vocabulary(self.vocab_size, draft_vocab_size)
        self.layers = tuple(layers)
        self.norm_output, self.num_layers, self.sliding_window = norm_output, num_layers, sliding_window
        self.residual_widths += 4 * (num_layers - 1)
        hidden_size, epsilon = self.layer_config.hidden_size, self.layer_config.rms_norm_eps
        wide = len(self.layers) * hidden_size
        self.layer_config.attention_bias = attention_bias
        self.embed_tokens = nn.Embedding(self.vocab_size, hidden_size) if own_embedding else None
        self.input_norm = RMSNorm(wide, epsilon) if norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(hidden_size, epsilon) for _ in self.layers) if fc_norm else None
        self.fc = nn.Linear(wide, hidden_size, bias=False)
        self.midlayer = FusionLayer(self.layer_config, qk_norm, norm_before_residual)
        self.later = nn.ModuleList(LaterLayer(self.layer_config, qk_norm) for _ in range(num_layers - 1))
        self.norm = RMSNorm(hidden_size, epsilon)
        self.lm_head = DraftHead(hidden_size, draft_vocab_size, bias=False)
        self.apply(initialize)
        self.lm_head.weight.requires_grad_(projection != "frozen")
        self.norm.weight.requires_grad_(output_norm != "frozen")

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        **options: Any,
    ) -> "Eagle3":
        """A head shaped like one layer of ``target``. draft_vocabulary: ascending target ids ``[Vd]``; None for the
        whole vocabulary. Raises UserError for layers that the target has not, and for the final norm of a target whose
        norm is of another kind."""
        size = target.vocab_size if draft_vocabulary is None else len(draft_vocabulary)
        layers = target.check_layers(target.default_layers() if layers is None else layers)
        shape = shape_of(target, intermediate_size)
        head = cls(draft_vocab_size=size, layers=layers, **shape, **options)
        if draft_vocabulary is not None:
            head.set_draft_vocabulary(draft_vocabulary)
        if head.config()["projection"] != "scratch":
            rows = plain(target.head.weight.detach())[head.draft_ids.to(target.device)]
            head.lm_head.weight.data.copy_(rows * target.logit_scale)  # engines apply none to a head
        if head.config()["output_norm"] != "ones":
            head.norm.weight.data.copy_(final_norm_scale(target))
        if head.embed_tokens is not None:
            head.embed_tokens.weight.data.copy_(plain(target.embedding_weight.detach()))
        head.bind(target)
        return head

    def training_flops(self, sequence_length: int) -> tuple[float, float]:
        """The fusion runs in the first step alone, and its inputs need no gradient; an embedding is looked up."""
        forward, backward = super().training_flops(sequence_length)
        fusion, later = 2.0 * self.fc.weight.numel(), self.passes - 1
        looked_up = 0.0 if self.embed_tokens is None else 2.0 * self.passes * self.embed_tokens.weight.numel()
        return forward - later * fusion - looked_up, backward - (2 * later + 1) * fusion - 2 * looked_up

    def activation_bytes(self, tokens: int, element: int) -> float:
        """With what the further norms keep: of the fusion's input once, of queries and keys at every pass."""
        config, norms = self.layer_config, int(self.input_norm is not None) + int(self.fc_norm is not None)
        fused = norms * self.fc.in_features
        if self.midlayer.self_attn.q_norm is not None:
            rotated = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
            fused += self.passes * self.num_layers * rotated
        return super().activation_bytes(tokens, element) + float(fused * tokens * element)

    def feature(self, features: Features) -> Tensor:
        """See ``EagleHead``."""
        return self.fuse(features.aux.flatten(0, 1))

    def fuse(self, aux: Tensor) -> Tensor:
        """Concatenated auxiliary states ``[R, 3H]`` -> the feature ``[R, H]``."""
        aux = aux.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), dim=-1)  # [R, H] each
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)  # [R, 3H]
        return self.fc(aux)  # [R, H]

    def embed(self, tokens: Tensor) -> Tensor:
        """See ``EagleHead``."""
        return super().embed(tokens) if self.embed_tokens is None else self.embed_tokens(tokens)

    def _layer(self, embedded: Tensor, feature: Tensor, attends: Attends) -> Output:
        output = self.midlayer(embedded, feature, attends[0])  # [n, H], and of several layers [N, H] below the last
        for layer, attend in zip(self.later, attends[1:], strict=True):
            output = layer(output, attend)
        normed = self.norm(output)  # [n, H]
        return Output(normed, normed if self.norm_output else output)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``EagleHead``."""
        return self.lm_head(hidden)  # [n, Vd]

    def _loss(self, steps: Sequence[Step], teacher: Teacher) -> TrainingLoss:
        return call_with_weights([self.lm_head], lambda weights: self._learn(weights, steps, teacher))


def final_norm_scale(target: Target) -> Tensor:
    """What the target's final norm multiplies a normed state by, ``[H]`` fp32: its weight, or one more than that, as
    Gemma has it. Raises UserError if the norm does more than that."""
    generator = torch.Generator().manual_seed(0)
    ones, states = torch.ones(1, target.hidden_size), torch.randn(4, target.hidden_size, generator=generator)
    scale, found = (target.norm(each.to(target.device, target.dtype)).float() for each in (ones, states))
    expected = scale * torch.nn.functional.rms_norm(states.to(target.device), (target.hidden_size,))
    if target.device.type != "meta" and not torch.allclose(found, expected, rtol=2e-2, atol=2e-2):
        what = f"the final norm of {target.architecture} is no RMSNorm: expected one"
        raise UserError(f"{what}, or model.drafter.output_norm=ones")
    return scale[0]


def _check(num_layers: int, sliding_window: int | None, ttt_steps: int, biased_and_normed: bool) -> None:
    if num_layers < 1:
        raise UserError(f"num_layers is {num_layers}: expected at least 1 layer")
    if sliding_window is not None and sliding_window <= ttt_steps:
        wrong = f"sliding_window is {sliding_window} and ttt_steps {ttt_steps}"
        raise UserError(f"{wrong}: expected a window of more positions than steps, or null for all")
    if biased_and_normed:
        raise UserError(
            "attention_bias and qk_norm are both set: expected one of them, because vLLM's Qwen3 layers have no bias "
            "at their output; set one to false"
        )
