"""Quantized weights as compressed-tensors writes them, which engines read with no word on the command line.

O / I = output / input features, G = scales of a row.

- 8 bits, ``int-quantized``: ``weight`` int8 ``[O, I]`` and ``weight_scale`` fp32 ``[O, 1]``.
- 4 bits, ``pack-quantized``: ``weight_packed`` int32 ``[O, I / 8]``, eight codes above -8 from the lowest bits up,
  ``weight_scale [O, G]`` of the weights' dtype, and ``weight_shape`` int64 ``[2]``.

Written here rather than by the library, so that an export needs no further package; tests read it with the library."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.drafters.quantization import SCHEMES, QuantizedLinear, Scheme, quantize_weight
from specdraft.errors import UserError
from specdraft.export.layout import Layout

_KEPT = ("lm_head.weight", "embed_tokens.weight")
_CODES = 8  # of 4 bits, in an int32


def compress(layout: Layout, drafter: Drafter) -> Layout:
    """The layout of a quantized drafter, its linear layers' weights as codes and scales. Raises UserError if they are
    not those that the drafter computes with: experts of a mixture, say, are no linear layers to transformers."""
    assert drafter.quantization is not None
    scheme = SCHEMES[drafter.quantization]
    names = [n for n, t in layout.tensors.items() if t.ndim == 2 and n.endswith(".weight") and not n.endswith(_KEPT)]
    layers = [module for module in drafter.modules() if isinstance(module, QuantizedLinear)]
    if len(names) != len(layers):
        wrong = f"the {layout.title} has {len(names)} matrices of which {len(layers)} are plain linear layers"
        raise UserError(f"{wrong}: expected no others in a quantized drafter; export it with quantize=null")
    tensors = {name: tensor for name, tensor in layout.tensors.items() if name not in names}
    for name in names:
        tensors |= _compressed(name, layout.tensors[name], scheme)
    config = layout.config | {"quantization_config": quantization_config(scheme)}
    facts = layout.facts | {"quantization": f"{drafter.quantization} ({_described(scheme)}); the vocabulary's is not"}
    return replace(layout, config=config, tensors=tensors, facts=facts, quantization=drafter.quantization)


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """What ``config.json`` says of the scheme, in compressed-tensors' words."""
    common = {"type": "int", "symmetric": True}
    grouping = {"strategy": "channel"} if scheme.group is None else {"strategy": "group", "group_size": scheme.group}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {"num_bits": scheme.bits, **common, **grouping, "dynamic": False},
        "input_activations": None,
    }
    if scheme.input_bits is not None:
        group["input_activations"] = {"num_bits": scheme.input_bits, **common, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if scheme.bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*lm_head"],
    }


def _compressed(name: str, weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    codes, scales = quantize_weight(weight, scheme)
    if scheme.bits == 8:
        return {name: codes, f"{name}_scale": scales}
    shape = torch.tensor(weight.shape)
    return {f"{name}_packed": _pack(codes), f"{name}_scale": scales, f"{name}_shape": shape}


def _pack(codes: Tensor) -> Tensor:
    """Codes of 4 bits, int8 ``[O, I]`` -> int32 ``[O, I / 8]``."""
    shifts = 4 * torch.arange(_CODES)
    return ((codes.long() + 8).unflatten(1, (-1, _CODES)) << shifts).sum(-1).to(torch.int32)


def _described(scheme: Scheme) -> str:
    scales = "row" if scheme.group is None else f"{scheme.group} weights"
    inputs = "" if scheme.input_bits is None else f", inputs of {scheme.input_bits} bits with a scale per token"
    return f"weights of {scheme.bits} bits with a scale per {scales}{inputs}"
