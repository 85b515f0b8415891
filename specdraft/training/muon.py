"""Muon for matrices, AdamW for all else, as one optimizer.

Muon makes of a matrix's momentum the nearest orthogonal one, so that all directions of its update are equally long
(Jordan et al. 2024), scaled to the size of AdamW's updates (Moonlight, 2502.16982, section 2.2).
Vocabulary tables, whose rows are learned one by one, and vectors are AdamW's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdraft.onednn import emulates_bfloat16


class Muon(torch.optim.Muon):
    """torch's own, which orthogonalizes in bfloat16 everywhere, but in float32 where bfloat16 is emulated."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # called without a closure alone
        """One update of all matrices."""
        for group in self.param_groups:
            momentum, rate = group["momentum"], group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad, memory_format=torch.preserve_format)
                buffer = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
                update = matrix.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
                dtype = torch.float32 if emulates_bfloat16(matrix.device) else torch.bfloat16
                update = orthogonal(update.to(dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """``matrix [m, n]`` with singular values near 1, by ``steps`` of a quintic Newton-Schulz iteration in its dtype."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T, coefficients, steps, eps).T
    a, b, c = coefficients
    matrix = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix


class MuonAdamW(torch.optim.Optimizer):
    """Both over one list of groups, Muon's first, and one dictionary of states, as a checkpoint holds them."""

    def __init__(
        self, matrices: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], momentum: float, **adamw: Any
    ) -> None:
        """Groups of parameters with their ``lr`` and ``weight_decay``, none of them empty; ``adamw``: its options."""
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, momentum=momentum))
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
