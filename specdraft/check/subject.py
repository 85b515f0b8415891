"""What is checked: a drafter as its configuration makes it, with weights that all matter."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.errors import UserError
from specdraft.targets import Target

_NOISE = 0.6  # times one over the root of what a row sums over: about as large as a usual start


@dataclass(frozen=True)
class Subject:
    """``make`` is called with ``target`` and ``draft_vocabulary``, as a training does. samples: answers that the
    check of sampling decodes."""

    make: Callable[..., Any]
    target: Target
    vocabulary: Tensor
    seed: int = 0
    samples: int = 2000

    prompts: list[list[int]] = field(init=False)
    """Texts of different lengths to be continued."""

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = (9, 3, 6, 2)
        made = [torch.randint(self.target.vocab_size, (length,), generator=g).tolist() for length in lengths]
        object.__setattr__(self, "prompts", made)

    @property
    def close(self) -> float:
        """How far apart two probabilities may be that are the same by other arithmetic: norms and rotary angles are
        computed in fp32 everywhere."""
        return 2e-5 if self.target.dtype == torch.float64 else 1e-3

    def plain(self, target: Target | None = None) -> Drafter:
        """A new drafter, as the configuration begins it. Raises UserError for what is none."""
        target = target or self.target
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            drafter = self.make(target=target, draft_vocabulary=self.vocabulary.clone())
        if not isinstance(drafter, Drafter):
            wanted = "model.drafter._target_ to name a function that returns a specdraft.drafters.base.Drafter"
            raise UserError(f"model.drafter makes {type(drafter).__name__}: expected {wanted}")
        return drafter

    def drafter(self) -> Drafter:
        """A new one in the target's dtype whose trained weights have noise on them, the same each time: what begins as
        zeros or as a copy of the target would hide mistakes."""
        drafter = self.plain().to(self.target.device, self.target.dtype).eval()
        g = torch.Generator().manual_seed(self.seed + 2)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if not parameter.requires_grad:
                    continue
                scale = 0.1 if parameter.dim() < 2 else _NOISE * parameter.shape[-1] ** -0.5
                noise = scale * torch.randn(parameter.shape, generator=g)
                noised = (parameter.cpu().float() + noise).to(parameter)  # in fp32, as a checkpoint keeps it
                parameter.copy_(noised)
        return drafter

    def decoding_target(self, drafter: Drafter) -> Target:
        """What is decoded with: the target, or what a drafter that tunes it makes of it."""
        return drafter.tuned(self.target)
