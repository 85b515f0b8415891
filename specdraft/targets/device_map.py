"""A target too large for one device, in one process: layers lie on all GPUs, then in the host's memory, then on disk.

accelerate moves what a layer reads to where the layer is, and weights that no GPU has room for to the first GPU while
they are used. Embedding, final norm and head stay on the first device, where the drafter is trained, because the loss
reads the head once per chunk of positions."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import get_max_memory
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specdraft.errors import UserError
from specdraft.targets.loading import checkpoint_dtype, location

Place = int | str
"""The number of a GPU, "cpu" or "disk"."""

# Of the first GPU, which trains the drafter as well, if nobody says how much the target may have.
_SHARE_OF_THE_FIRST = 0.5


def device_map(
    name: str,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    max_memory: Mapping[Place, int | str] | None,
    layers_on_devices: bool = True,
) -> dict[str, Place]:
    """Where ``from_pretrained`` puts each module of the target ``name``. ``max_memory`` is in bytes or like "40GiB", by
    place; None takes what is free, of the first GPU half, or with ``layers_on_devices`` False nothing for the layers,
    which then stay on disk. Raises UserError where the first device has no room for embedding and head."""
    config = AutoConfig.from_pretrained(location(name), revision=revision, trust_remote_code=trust_remote_code)
    with init_empty_weights():
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    skeleton.to(checkpoint_dtype(name, revision, dtype, trust_remote_code)).tie_weights()
    if max_memory is None and not layers_on_devices:
        first: Place = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        return spread(skeleton, {first: _outside(skeleton)})
    rooms: dict[Place, int] = get_max_memory(None if max_memory is None else dict(max_memory))
    if max_memory is None and torch.cuda.is_available():
        rooms[0] = int(rooms[0] * _SHARE_OF_THE_FIRST)
    return spread(skeleton, rooms)


def spread(model: Any, rooms: Mapping[Place, int]) -> dict[str, Place]:
    """Layers from first to last into ``rooms``, bytes by place in their order, then on disk; all else into the first.
    Raises UserError if the first has no room for all else."""
    layers = model.get_decoder().layers
    order = iter(rooms)
    place = next(order)
    left = rooms[place] - _outside(model)
    if left < 0:
        sizes = f"take {_outside(model) / 1e9:.2g} GB, and {place} has room for {rooms[place] / 1e9:.2g} GB"
        mend = "raise target.max_memory, or choose target.placement=zero3"
        raise UserError(f"embedding and head of the target {sizes}: {mend}")
    places = dict.fromkeys(_around(model, layers, ""), place)
    path = next(name for name, module in model.named_modules() if module is layers)
    for number, layer in enumerate(layers):
        while place != "disk" and _bytes(layer) > left:
            place = next(order, "disk")
            left = rooms.get(place, 0)
        places[f"{path}.{number}"] = place
        left -= _bytes(layer)
    return places


def _around(module: nn.Module, layers: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if all(inner is not layers for inner in child.modules()):
            yield prefix + name
        elif child is not layers:
            yield from _around(child, layers, f"{prefix}{name}.")


def _outside(model: Any) -> int:
    """Bytes of all that is no layer."""
    return _bytes(model) - _bytes(model.get_decoder().layers)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
