"""Weights and optimizer states of a DeepSpeed run as one process would hold them, and back.

The form is torch's own, ``module.state_dict()`` and ``optimizer.state_dict()``, in fp32: a file does not tell how many
ranks wrote it, nor at which ZeRO stage. Every function here is called by every rank."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor, nn

from specdraft.drafters.base import Drafter
from specdraft.drafters.quantization import quantize
from specdraft.targets import Target
from specdraft.targets.sharded import gathered


@torch.no_grad()
def full_state(module: nn.Module) -> dict[str, Tensor]:
    """``module.state_dict()`` on the CPU, with the fp32 masters of what is trained and with every parameter whole."""
    from deepspeed.utils import safe_get_full_fp32_param

    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if value.requires_grad:
            state[name] = safe_get_full_fp32_param(value).cpu()
        else:
            with gathered([value]):  # ZeRO-3 cuts the frozen ones too, under a LoRA
                state[name] = value.detach().cpu().clone()
    return state


@torch.no_grad()
def full_precision_drafter(strategy: Strategy, drafter: Drafter, target: Target) -> Drafter:
    """The drafter to decode with and to save, in fp32: the trained one, under DeepSpeed a whole copy of its masters."""
    if not isinstance(strategy, DeepSpeedStrategy):
        return drafter.served()
    copy = type(drafter)(**drafter.config())
    copy.load_state_dict(full_state(drafter))
    copy.files = drafter.files
    quantize(copy, drafter.quantization)
    copy.bind(target)
    return copy.to(strategy.root_device).served()


@torch.no_grad()
def load_full_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill the masters and what training computes with. Raises KeyError where ``state`` lacks a name."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    for name, value in module.state_dict(keep_vars=True).items():
        full = state[name].to(value.device)
        with gathered([value], written=True):
            value.data.copy_(full)
        if hasattr(value, "ds_id") and value.requires_grad:
            safe_set_local_fp32_param(value, _own_part(value, full))
        elif value.requires_grad:
            safe_set_full_fp32_param(value, full)


@torch.no_grad()
def full_optimizer_state(zero: Any, groups: Sequence[Sequence[nn.Parameter]]) -> dict[str, Any]:
    """``state_dict()`` of the optimizer within DeepSpeed's ``zero``, on the CPU, over the parameters that it was built
    with, ``groups``."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _link_states(zero)
    sample = zero.optimizer.state[_flat_masters(zero)[0]]
    cut = [key for key, value in sample.items() if _is_cut(value)]
    whole = {key: torch.as_tensor(value).clone().float() for key, value in sample.items() if key not in cut}
    state: dict[int, Any] = {}
    settings = []
    for group, parameters in zip(zero.optimizer.param_groups, groups, strict=True):
        numbers = list(range(len(state), len(state) + len(parameters)))
        settings.append({key: value for key, value in group.items() if key != "params"} | {"params": numbers})
        for parameter in parameters:
            values = {key: safe_get_full_optimizer_state(parameter, key).cpu() for key in cut}
            state[len(state)] = {key: value.clone() for key, value in whole.items()} | values
    return {"state": state if sample else {}, "param_groups": settings}


@torch.no_grad()
def load_full_optimizer_state(zero: Any, groups: Sequence[Sequence[nn.Parameter]], saved: Mapping[str, Any]) -> None:
    """Fill the optimizer within ``zero``, before its first step, with a ``state_dict()`` of the same parameters."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    for group, settings in zip(zero.optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    if not saved["state"]:
        return
    first = saved["state"][0]
    cut = [key for key, value in first.items() if _is_cut(value)]
    for master in _flat_masters(zero):  # there are no states before the first step
        state = {key: torch.zeros_like(master) for key in cut}
        zero.optimizer.state[master] = state | {key: _own_kind(zero, first[key]) for key in first if key not in cut}
    _link_states(zero)
    for number, parameter in enumerate(chain.from_iterable(groups)):
        for key in cut:
            value = saved["state"][number][key].to(parameter.device)
            if hasattr(parameter, "ds_id"):
                safe_set_local_optimizer_state(parameter, _own_part(parameter, value), key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)


def _flat_masters(zero: Any) -> list[Tensor]:
    """The fp32 vectors of this rank, which the optimizer within ``zero`` updates: of stage 3, or of 1 and 2."""
    third = getattr(zero, "fp32_partitioned_groups_flat", None)
    return list(zero.single_partition_of_fp32_groups if third is None else third)


def _link_states(zero: Any) -> None:
    """Tell the parameters of stages 1 and 2 where their states are: DeepSpeed does that once, after the step of the
    first group of parameters, when those of the second have none."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for parameters, master in zip(getattr(zero, "bit16_groups", ()), _flat_masters(zero), strict=False):
        lazy_init_hp_params_optimizer_state(parameters, master, zero.optimizer.state)


def _is_cut(value: Any) -> bool:
    """Whether a state has an element for each of a parameter's, and not one for all of them (the count of steps)."""
    return isinstance(value, Tensor) and value.ndim > 0


def _own_kind(zero: Any, value: Any) -> Any:
    """The count of steps as the optimizer within ``zero`` keeps it: torch's as a tensor, DeepSpeed's as an integer."""
    own = type(zero.optimizer).__module__.startswith("torch.")
    return value.clone() if own and isinstance(value, Tensor) else int(value)


def _own_part(parameter: Any, value: Tensor) -> Tensor:
    """This rank's piece of ``value``, cut as ZeRO-3 has cut ``parameter``, the last one padded: DeepSpeed's own
    ``safe_set_full_*`` reads behind the end of a parameter that the ranks do not divide."""
    size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
    part = value.flatten()[size * rank : size * (rank + 1)]
    return torch.nn.functional.pad(part, (0, size - part.numel()))
