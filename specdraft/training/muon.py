"""Muon for matrices, AdamW for all else, as one optimizer.

Muon makes of a matrix's momentum the nearest orthogonal one, so that all directions of its update are equally long
(Jordan et al. 2024). It is torch's own, scaled to the size of AdamW's updates (Moonlight, 2502.16982, section 2.2).
Vocabulary tables, whose rows are learned one by one, and vectors are AdamW's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MuonAdamW(torch.optim.Optimizer):
    """Both over one list of groups, Muon's first, and one dictionary of states, as a checkpoint holds them."""

    def __init__(
        self, matrices: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], momentum: float, **adamw: Any
    ) -> None:
        """Groups of parameters with their ``lr`` and ``weight_decay``, none of them empty; ``adamw``: its options."""
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, **adamw))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Loading a state replaces groups and states: the parts work with what is here."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss
