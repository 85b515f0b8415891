"""A chunk's divergence, acceptance, best tokens and gradient on a processor, compiled: torch's operations of
``eager.py`` in a few passes over all rows, for which threads are woken once.

c = positions of a chunk, V / Vd = target / draft vocabulary."""

import torch
from torch import Tensor

from specdraft.losses.divergence import Compared, Distribution, Divergence
from specdraft.losses.eager import compared, distribution, finite, in_full_precision

_GRAPHS = 64  # that one function may be compiled to


class Compiled:
    """A ``Comparison`` on a processor in fp32, of logits in any dtype up to that."""

    def __init__(self, divergence: Divergence) -> None:
        """Of a divergence that torch compiles."""
        self.divergence = divergence
        torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)

    @in_full_precision
    def target(self, logits: Tensor, draft_ids: Tensor | None, label: Tensor | None) -> Distribution:
        """See ``Comparison``."""
        if draft_ids is None:
            p = logits if logits.dtype == torch.float32 else torch.empty_like(logits, dtype=torch.float32)
        else:
            p = logits.new_empty((len(logits), len(draft_ids)), dtype=torch.float32)
        return Distribution(p, *_target(logits, draft_ids, p), label)

    @in_full_precision
    def draft(self, z: Tensor, target: Distribution, index: Tensor | None, keep: bool) -> Compared:
        """See ``Comparison``."""
        grad = torch.empty_like(z) if keep else z
        index = torch.arange(len(z)) if index is None else index  # one graph for both
        return Compared(*_draft(self.divergence, z, target, index, grad), grad)


@torch.compile(fullgraph=True, dynamic=True)
def _target(logits: Tensor, draft_ids: Tensor | None, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found, p_log_p, mass, best = distribution(finite(_own(logits)), draft_ids)
    p.copy_(found)
    return p_log_p, mass, best


@torch.compile(fullgraph=True, dynamic=True)
def _draft(
    divergence: Divergence, z: Tensor, target: Distribution, index: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    values, alpha, drafted, grad_z = compared(divergence, finite(_own(z)), target.at(index))
    grad.copy_(grad_z)
    return values, alpha, drafted


def _own(logits: Tensor) -> Tensor:
    """In fp32. No copy is made of what one pass reads and overwrites; without it that pass would write it twice."""
    return logits.to(torch.float32, copy=True)
