"""P-EAGLE (2602.01469): the EAGLE-3 head with masks in the place of what is drafted, all tokens from one pass.

a = auxiliary layers, H = hidden size (the target's), K = drafted tokens.

- The first token of a draft comes as in EAGLE-3: from the last emitted token and the fused feature before it.
- For each further one the head reads the mask: a token that no text holds, and hidden states that it learns in the
  place of the target's, ``mask_hidden [1, 1, a*H]``, which go through norms and fusion as those do.
- Attention is that of the training-time test: a mask sees the text up to where the draft began, and the masks before
  it in the same draft. Nothing that is drafted is read, so that training needs no unrolling of its own output, and a
  step may learn from ever fewer positions (section 3; 0.7 of those of the step before it, a fifth at least)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdraft.drafters.alignment import Alignment, StepDecay
from specdraft.drafters.base import constructor_arguments
from specdraft.drafters.eagle.eagle3 import Eagle3
from specdraft.drafters.eagle.forward import unroll
from specdraft.drafters.eagle.mask_drafting import MaskDrafting
from specdraft.drafters.mask_token import check_mask_token
from specdraft.drafters.mask_token import mask_token as mask_token_of
from specdraft.losses.chunked import Step
from specdraft.targets import Target

LEAST_SHARE = 0.2


class PEagle(Eagle3, family="p_eagle"):
    """The parallel head; vLLM's method ``eagle3`` loads it with ``parallel_drafting``. ``ttt_steps`` are the tokens of
    its longest draft."""

    quantizable = False  # vLLM's integer product takes no mask of three dimensions

    def __init__(self, mask_token: int, **shared: Any) -> None:
        """``mask_token``: an id that no text holds. ``shared`` is what ``Eagle3`` takes. Raises UserError as ``Eagle3``
        does, and for a mask that is no token."""
        arguments = constructor_arguments(locals())
        super().__init__(**shared)
        check_mask_token(mask_token, self.vocab_size)
        self._arguments |= arguments
        self.mask_token = mask_token
        self.decay = StepDecay(self.decay.base, self.decay.sampled, floor=LEAST_SHARE)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    @classmethod
    def for_target(
        cls,
        target: Target,
        draft_vocabulary: Tensor | None = None,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        mask_token: int | None = None,
        **options: Any,
    ) -> "PEagle":
        """As ``Eagle3.for_target``; mask_token: None for one that no text has."""
        mask = mask_token_of(target.tokenizer, target.vocab_size) if mask_token is None else mask_token
        head = super().for_target(target, draft_vocabulary, layers, intermediate_size, mask_token=mask, **options)
        assert isinstance(head, cls)
        return head

    def mask_feature(self) -> Tensor:
        """The feature of a mask, ``[1, H]``."""
        return self.fuse(self.mask_hidden[0])

    def _unroll(self, alignment: Alignment, feature: Tensor, decay: StepDecay) -> list[Step]:
        angles = self.rotary(alignment.length + len(alignment.counts) - 1, self.fc.weight)
        mask = self.mask_token, self.mask_feature()
        return unroll(self.read, alignment, feature, angles, decay, self.num_layers, self.sliding_window, mask)

    def drafting(self, rows: int, capacity: int) -> MaskDrafting:
        """See ``Drafter``."""
        return MaskDrafting(self, rows, capacity)
