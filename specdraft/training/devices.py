"""Which devices take part, from the ``trainer`` settings alone."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdraft.errors import UserError


def world_size(trainer: Mapping[str, Any]) -> int:
    """How many devices take part, from the ``trainer`` settings."""
    default = torch.cuda.device_count() if uses_gpus(trainer["accelerator"]) else 1
    return count_devices(trainer["devices"], default) * int(trainer["num_nodes"])


def uses_gpus(accelerator: str) -> bool:
    """Whether training runs on CUDA devices."""
    return accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def wants_compiled(choice: bool | str, gpus: bool) -> bool:
    """Whether training compiles what it repeats: auto is on GPUs, where launching its kernels takes longer than some of
    them. Raises UserError for another choice."""
    if choice not in (True, False, "auto"):
        raise UserError(f"compile is {choice!r}: expected auto, true or false")
    return gpus if choice == "auto" else bool(choice)


def claim_gpu(trainer: Mapping[str, Any]) -> None:
    """Make this process's own GPU the current one, so that not every rank loads the target onto the first."""
    if uses_gpus(trainer["accelerator"]):
        rank = int(os.environ.get("LOCAL_RANK", 0))
        listed = device_numbers(trainer["devices"])
        torch.cuda.set_device(rank if listed is None else listed[rank])


def device_numbers(devices: int | str | Sequence[int]) -> list[int] | None:
    """Those listed ("0,2" or [0, 2]), else None (a count, "auto" or -1). Raises UserError for what is neither."""
    comma = isinstance(devices, str) and "," in devices
    listed = [part.strip() for part in str(devices).split(",") if part.strip()] if comma else devices
    if isinstance(listed, Sequence) and not isinstance(listed, str) and all(str(part).isdigit() for part in listed):
        return [int(part) for part in listed]
    if str(devices) not in ("auto", "-1") and not str(devices).isdigit():
        raise UserError(f"trainer.devices is {devices}: expected auto, a number, or a list like [0,2]")
    return None


def count_devices(devices: int | str | Sequence[int], default: int) -> int:
    """How many ``trainer.devices`` asks for, ``default`` of them with auto. Raises UserError as ``device_numbers``."""
    if (listed := device_numbers(devices)) is not None:
        return len(listed)
    return default if str(devices) in ("auto", "-1") else int(str(devices))
