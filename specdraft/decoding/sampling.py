"""Sampling settings, and the distribution that they make of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.errors import UserError

Generators = Sequence[torch.Generator | None]
"""One for each of several requests."""


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature is {self.temperature}: expected 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: expected 0 (off) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: expected a number above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is sampled: fp32 ``[..., V]`` from logits ``[..., V]``, zeros outside top-k and top-p;
        greedy, the one-hot of the argmax. Drafts and verification both call this, so that q is what was really sampled
        and p what the target would have sampled (Leviathan et al., 2211.17192, section 2.2)."""
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        scaled = logits.float() / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            kth = scaled.topk(self.top_k).values[..., -1:]
            scaled = scaled.masked_fill(scaled < kth, -torch.inf)
        p = scaled.softmax(-1)
        if self.top_p < 1:
            ordered, index = p.sort(dim=-1, descending=True, stable=True)
            # The first token whose inclusion reaches top_p stays; what came before it stays with it.
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            ordered = ordered.masked_fill(outside, 0.0)
            p = torch.zeros_like(p).scatter(-1, index, ordered)
            p = p / p.sum(-1, keepdim=True)
        return p


def sample(p: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token id from each of ``p [..., V]`` (non-negative; need not sum to one) -> ids ``[...]``."""
    return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator).reshape(p.shape[:-1])
