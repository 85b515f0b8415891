"""Divergences between a target distribution p and a draft distribution q = softmax(z), with their gradients.

c = rows of a chunk, Vd = draft vocabulary. p sums to one over the draft vocabulary. Value and gradient come together
because the chunked loss needs the gradient while the logits of a chunk are still in memory.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Draft(NamedTuple):
    """The draft's side of a chunk: logits z ``[c, Vd]``, their log normaliser ``[c]``, q = softmax(z) ``[c, Vd]``."""

    z: Tensor
    log_normaliser: Tensor
    q: Tensor


class Divergence(Protocol):
    """A divergence of p from the draft's q."""

    def __call__(self, draft: Draft, p: Tensor, p_log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[c]`` in nats and the gradient in z ``[c, Vd]``; ``draft.z`` and ``draft.q`` may be overwritten.

        ``p_log_p [c]`` is sum p log p, made once per position though several steps predict it.
        """


def forward_kl(draft: Draft, p: Tensor, p_log_p: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p log p - sum p z + logsumexp(z); the gradient in z is q - p."""
    values = p_log_p - torch.linalg.vecdot(p, draft.z) + draft.log_normaliser
    return values, draft.q.sub_(p)
