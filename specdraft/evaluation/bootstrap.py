"""Bootstrap confidence intervals over prompts, for ratios of sums.

P = prompts, C = columns, R = resamples.

Prompts are resampled, not rounds: the rounds of one prompt resemble each other, and treating them as independent
would make the interval too narrow.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Interval = tuple[float, float]


def bootstrap_interval(
    columns: Tensor,
    statistic: Callable[[Tensor], Tensor],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """Percentile interval of ``statistic`` (Efron 1979), or None where it is undefined: below two prompts.

    columns: ``[P, C]``, sums per prompt. statistic: from column sums ``[R, C]`` of the resampled prompts to ``[R]``.
    Resamples in which the statistic is not finite (no prompt drafted anything) are left out.
    """
    prompts = columns.shape[0]
    if prompts < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(prompts, (resamples, prompts), generator=generator)
    # How often each prompt was drawn, [R, P]: sums are then one product, however many columns there are.
    weights = torch.zeros(resamples, prompts, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    values = statistic(weights @ columns.double())  # [R]
    values = values[values.isfinite()]
    if values.numel() == 0:
        return None
    tail = (1 - confidence) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
