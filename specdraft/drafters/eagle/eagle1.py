"""EAGLE-1 (2401.15077): the head continues the target's last hidden state; the target's own projection reads it.

R = positions of the flat batch, N = positions of a pass, n = queries, H = hidden size, V = vocabulary.

- The feature is the target's last hidden state after its final norm, the one that its LM head reads.
- ``fc`` makes one vector of ``[embedding of the next token, feature]``, 2H -> H; a decoder layer without a norm before
  its attention makes of it the next feature, with no norm after it.
- The logits are the target's own of that feature: whole vocabulary, own scale and soft-cap, nothing of it trained.

EAGLE-2 (2406.16858) is this head drafting in a ``DynamicTree``."""

from typing import Any

import torch
from torch import Tensor, nn

from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.eagle.borrowed_head import BorrowedHead
from specdraft.drafters.eagle.forward import Attends, Output, PlainLayer
from specdraft.drafters.layers import initialize, shape_of
from specdraft.errors import UserError
from specdraft.targets import Features, Target


class Eagle(BorrowedHead):
    """The EAGLE-1 head. vLLM's method ``eagle`` (``EagleLlamaForCausalLM``) loads ``fc.weight`` as it is and
    ``midlayer.*`` as ``layers.0.*``, and shares embedding and LM head with the target if the file has neither."""

    TITLE = "EAGLE-1"
    training_options = BorrowedHead.training_options | {"feature_noise"}
    residual_widths = 5

    def __init__(
        self,
        ttt_steps: int = 1,
        regression_weight: float = 1.0,
        distillation_weight: float = 0.1,
        feature_noise: float = 0.0,
        **shared: Any,
    ) -> None:
        """Build with random weights; ``shared`` is what every ``EagleHead`` takes, ``feature_noise`` the bound of the
        noise in training (section 3.2; the paper's is 0.1). Raises UserError for a negative bound, and as ``EagleHead``
        does."""
        arguments = constructor_arguments(locals())
        shared |= {"regression_weight": regression_weight, "distillation_weight": distillation_weight}
        super().__init__(ttt_steps=ttt_steps, **shared)
        if feature_noise < 0:
            raise UserError(f"feature_noise is {feature_noise}: expected 0 (none) or the bound of a uniform noise")
        self.feature_noise = feature_noise
        self._arguments |= arguments
        hidden_size = self.layer_config.hidden_size
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.midlayer = PlainLayer(self.layer_config)
        self.apply(initialize)

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        intermediate_size: int | None = None,
        **options: Any,
    ) -> "Eagle":
        """A head shaped like one layer of ``target``. Raises UserError for a draft vocabulary that is not the whole."""
        cls.check_whole(target, draft_vocabulary)
        head = cls(**shape_of(target, intermediate_size), **options)
        head.bind(target)
        return head

    def augment(self, features: Features, generator: torch.Generator) -> Features:
        """Uniform noise on what the head reads, so that it bears its own errors; ``last``, what it is to match, stays.
        The head reads no auxiliary states, so they take the disturbed ones, ``[B, T, H]``."""
        if self.feature_noise == 0:
            return features
        last = features.last.to(torch.promote_types(features.last.dtype, torch.float32))
        noise = torch.rand(last.shape, generator=generator, device=last.device, dtype=last.dtype)  # in [0, 1)
        return Features(last + self.feature_noise * (2 * noise - 1), features.last)

    def feature(self, features: Features) -> Tensor:
        """See ``EagleHead``."""
        read = features.aux if features.aux.shape[-1] else features.last  # [B, T, H]; see ``augment``
        return read.flatten(0, 1).to(self.fc.weight.dtype)

    def _layer(self, embedded: Tensor, feature: Tensor, attends: Attends) -> Output:
        x = self.fc(torch.cat([embedded, feature], dim=-1))  # [N, 2H] -> [N, H]
        output = self.midlayer(x, x, *attends)  # [n, H]
        return Output(output, output)
