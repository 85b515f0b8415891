"""Low-rank adapters of a frozen target that stays as it is: beside its weights in training, merged for decoding.

I / O = input / output features of a layer, r = rank.

The copies of a target that are made here have modules of their own and the target's tensors: what is not adapted is
never held twice. (On a CPU, packed layers of a merged copy are.)"""

import copy
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from specdraft.errors import UserError
from specdraft.onednn import PackedLinear, plain, unpack
from specdraft.targets import Target
from specdraft.targets.loading import NONE, quantization

Shapes = Mapping[str, Sequence[int]]
"""The adapted layers, ``[I, O]`` by their names in the target."""


class Adapters(nn.ModuleDict):
    """Of every layer a projection ``[r, I]`` and one ``[O, r]``, at zero before training; fp32 on the CPU."""

    def __init__(self, shapes: Shapes, rank: int) -> None:
        pairs = {name: (size[0], size[1]) for name, size in shapes.items()}
        super().__init__({_key(name): _pair(*sizes, rank) for name, sizes in pairs.items()})
        self.rank, self.names = rank, list(pairs)

    def pair(self, name: str) -> Any:
        """Of the layer of that name; ``A`` and ``B``."""
        return self[_key(name)]


def find_layers(target: Target, target_modules: str | Sequence[str]) -> dict[str, list[int]]:
    """The linear layers that peft means by ``target_modules``: "all-linear", all but the LM head; a list, those of such
    names or ends of names; another word, those whose whole name is of that pattern. Raises UserError for a target whose
    weights cannot be merged with anything, and for what names no layer, the LM head or another part."""
    check_mergeable(target)
    modules = dict(target.model.named_modules())
    linear = [name for name, each in modules.items() if isinstance(each, nn.Linear) and each is not target.head]
    if target_modules == "all-linear":
        found = linear
    elif isinstance(target_modules, str):
        found = [name for name in modules if re.fullmatch(target_modules, name)]
    else:
        ends = [str(end) for end in target_modules]
        found = [name for name in modules if any(name == end or name.endswith(f".{end}") for end in ends)]
    wanted = "all-linear, a list of ends of names of its linear layers but the LM head, or a pattern"
    if not found or not set(found) <= set(linear):
        named = next((name for name in found if name not in linear), "no layer of the target")
        raise UserError(f"model.drafter.target_modules names {named}: expected {wanted}")
    return {name: [modules[name].in_features, modules[name].out_features] for name in found}


def adapted(target: Target, adapters: Adapters, alpha: int) -> Any:
    """A copy of the target's model with the adapters beside its layers, which learns where the adapters do. Raises
    UserError for a target without such layers."""
    from peft import LoraConfig, inject_adapter_in_model  # here, because other drafters start a second earlier without

    model = _bare(target.model)
    _layers(model, adapters)
    inject_adapter_in_model(LoraConfig(r=adapters.rank, lora_alpha=alpha, target_modules=adapters.names), model)
    for name, layer in _layers(model, adapters).items():
        layer.lora_A["default"], layer.lora_B["default"] = adapters.pair(name).A, adapters.pair(name).B
    return model.eval()


@torch.no_grad()
def merged(target: Target, adapters: Adapters, alpha: int) -> Any:
    """A copy of the target's model with the adapters in the weights of its layers, in the target's dtype. Raises
    UserError as ``adapted``, and for a target whose weights cannot be merged."""
    check_mergeable(target)
    model = _bare(target.model)
    unpack(model)
    for name, layer in _layers(model, adapters).items():
        pair, weight = adapters.pair(name), plain(layer.weight)
        change = (alpha / adapters.rank) * (pair.B.weight @ pair.A.weight).to(weight.device)
        tuned = copy.copy(layer)
        tuned._parameters = {**layer._parameters, "weight": nn.Parameter((weight + change).to(weight.dtype), False)}
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, tuned)
    return model


def check_mergeable(target: Target) -> None:
    """Raises UserError for a target whose weights are elsewhere, or quantized."""
    elsewhere = target.engine is not None or target.server is not None or hasattr(target.model, "hf_device_map")
    if elsewhere:
        wanted = "target.placement=replicated, as all of its weights are tuned here"
        raise UserError(f"jacobi_forcing tunes the target, which is not whole on this device: expected {wanted}")
    if (scheme := quantization(target.config)) != NONE:
        wanted = "the checkpoint that they were quantized from"
        raise UserError(f"jacobi_forcing tunes the target, whose weights are quantized ({scheme}): expected {wanted}")


def _bare(model: Any) -> Any:
    """A copy of the modules, with the very same tensors and packed layers."""
    same = chain(
        model.parameters(), model.buffers(), (each for each in model.modules() if isinstance(each, PackedLinear))
    )
    return copy.deepcopy(model, {id(each): each for each in same})


def _layers(model: Any, adapters: Adapters) -> dict[str, Any]:
    """The layers of the adapters in a model. Raises UserError if it has others."""
    there = dict(model.named_modules())
    for name in adapters.names:
        layer, pair = there.get(name), adapters.pair(name)
        sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
        if sizes != (pair.A.in_features, pair.B.out_features):
            wanted = "the target that the adapters were trained for"
            raise UserError(f"the target has no layer {name} of the shape of its adapter: expected {wanted}")
    return {name: there[name] for name in adapters.names}


def _pair(inputs: int, outputs: int, rank: int) -> nn.ModuleDict:
    pair = nn.ModuleDict({"A": nn.Linear(inputs, rank, bias=False), "B": nn.Linear(rank, outputs, bias=False)})
    nn.init.zeros_(pair["B"].weight)  # type: ignore[arg-type]
    return pair


def _key(name: str) -> str:
    return name.replace(".", "/")  # names of modules have no dots
