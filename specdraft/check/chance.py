"""How well counts fit a distribution."""

import torch
from torch import Tensor

REJECTED = 1e-4
"""What is right falls below this p-value once in ten thousand seeds; what is wrong falls far below."""


def goodness_of_fit(outcomes: Tensor, p: Tensor) -> float:
    """p-value of the chi-square test that ``outcomes`` (``[N]`` flat indices into ``p``) were drawn from ``p``.

    An outcome without probability is impossible, not improbable: it gives 0. Cells that expect fewer than 5 are merged.
    """
    p = p.flatten().double()
    counts = torch.bincount(outcomes, minlength=len(p)).double()
    expected = p / p.sum() * len(outcomes)
    if bool(counts[expected == 0].any()):
        return 0.0
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) < 2:
        return 1.0
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
