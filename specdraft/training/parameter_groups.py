"""Which parameters share a learning rate and a weight decay."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from specdraft.errors import UserError


def parameter_groups(
    named: Mapping[str, nn.Parameter], learning_rate: float, weight_decay: float, factors: Mapping[str, float]
) -> list[dict[str, Any]]:
    """An optimizer's groups, none of them empty: matrices before vectors (norms, biases), which are not decayed; within
    each those first that no factor is for. ``factors``: of the learning rate of parameters whose names contain a key;
    of several the first counts."""
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, parameter in named.items():
        vector = parameter.ndim < 2
        factor = next((value for part, value in factors.items() if part in name), 1.0)
        rates = {"lr": learning_rate * factor, "weight_decay": 0.0 if vector else weight_decay}
        groups.setdefault((vector, factor), {"params": [], **rates})["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], key[1] != 1.0, key[1]))]


def check_factors(names: list[str], factors: Mapping[str, float]) -> None:
    """Raises UserError for a factor that is for no parameter."""
    for part in factors:
        if not any(part in name for name in names):
            wanted = f"a part of the name of one that is trained, as {names[0]}"
            raise UserError(f"model.optimizer.learning_rate_factors has {part!r}: expected {wanted}")
