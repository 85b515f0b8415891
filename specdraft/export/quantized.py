"""Quantized weights as compressed-tensors writes them, which engines read with no word on the command line.

O / I = output / input features, G = scales of a row.

- 8 bits, ``int-quantized``: ``weight`` int8 ``[O, I]`` and ``weight_scale`` fp32 ``[O, 1]``.
- 4 bits, ``pack-quantized``: ``weight_packed`` int32 ``[O, I / 8]``, eight codes above -8 from the lowest bits up,
  ``weight_scale [O, G]`` of the weights' dtype, and ``weight_shape`` int64 ``[2]``.

Written here rather than by the library, so that an export needs no further package; tests read it with the library."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.drafters.quantization import SCHEMES, QuantizedLinear, Scheme, quantize_weight, restore_weight
from specdraft.errors import UserError
from specdraft.export.layout import DTYPES, Layout

_KEPT = ("lm_head.weight", "embed_tokens.weight")
_CODES = 8  # of 4 bits, in an int32
_SCALE = "_scale"  # behind the weight's name


def compress(layout: Layout, drafter: Drafter) -> Layout:
    """The layout of a quantized drafter, its linear layers' weights as codes and scales. Raises UserError if they are
    not those that the drafter computes with: experts of a mixture, say, are no linear layers to transformers."""
    assert drafter.quantization is not None
    scheme = SCHEMES[drafter.quantization]
    names = _matrices(layout.tensors)
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


def scheme_of(config: Mapping[str, Any]) -> str | None:
    """The name of the scheme that an export's ``config.json`` says, None for weights as they are. Raises UserError for
    any other than those that ``compress`` writes."""
    said = config.get("quantization_config")
    if not said:
        return None
    for name, scheme in SCHEMES.items():
        if said == quantization_config(scheme):
            return name
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    wrong = f"the files hold weights that were quantized by {method!r} in a scheme that is not read back"
    wanted = f"{' or '.join(SCHEMES)} as export quantize= writes them, or weights as they were trained"
    raise UserError(f"{wrong}: expected {wanted}; give those")


def decompress(tensors: Mapping[str, Tensor], name: str, dtype: Any) -> dict[str, Tensor]:
    """The file's tensors with weights, fp32, in the place of codes and scales: such as ``compress`` with the scheme of
    that name makes these very codes and scales of. dtype: what the configuration says that it was given them in.
    Raises UserError where there are no such weights: parts are missing or of other shapes or dtypes, or another program
    found the scales in another way."""
    kept, scheme, kind = dict(tensors), SCHEMES[name], DTYPES.get(str(dtype))
    for weight in sorted({key.removesuffix(_SCALE) for key in tensors if key.endswith(_SCALE)} | {*_matrices(tensors)}):
        parts = [kept.pop(part) for part in _parts(weight, scheme) if part in kept]
        restored = None if kind is None else _restored(parts, scheme, kind)
        if restored is None:
            wrong = f"{weight} is not what {name} makes of any weight in {dtype}"
            wanted = f"codes and scales as export quantize={name} writes them"
            raise UserError(f"{wrong}: expected {wanted}; export it again")
        kept[weight] = restored
    return kept


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


def _matrices(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the weights that a quantized drafter has codes of."""
    return [n for n, t in tensors.items() if t.ndim == 2 and n.endswith(".weight") and not n.endswith(_KEPT)]


def _parts(name: str, scheme: Scheme) -> list[str]:
    """What the tensors of a weight are called: codes, scales, and the shape where codes are packed."""
    return [name, f"{name}{_SCALE}"] if scheme.bits == 8 else [f"{name}_packed", f"{name}{_SCALE}", f"{name}_shape"]


def _compressed(name: str, weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    codes, scales = quantize_weight(weight, scheme)
    tensors = [codes, scales] if scheme.bits == 8 else [_pack(codes), scales, torch.tensor(weight.shape)]
    return dict(zip(_parts(name, scheme), tensors, strict=True))


def _restored(parts: list[Tensor], scheme: Scheme, dtype: torch.dtype) -> Tensor | None:
    """The weight in fp32, None where there is none of ``dtype`` that these parts are made of."""
    try:
        codes, scales = parts[0] if scheme.bits == 8 else _unpack(parts[0]), parts[1]
        weight = restore_weight(codes, scales, scheme, dtype)
        again = _compressed("", weight, scheme).values()
        same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(again, parts, strict=True)]
    except (RuntimeError, ValueError, IndexError):  # parts that are missing, or of shapes that do not fit each other
        return None
    return weight.float() if all(same) else None


def _pack(codes: Tensor) -> Tensor:
    """Codes of 4 bits, int8 ``[O, I]`` -> int32 ``[O, I / 8]``."""
    shifts = 4 * torch.arange(_CODES)
    return ((codes.long() + 8).unflatten(1, (-1, _CODES)) << shifts).sum(-1).to(torch.int32)


def _unpack(packed: Tensor) -> Tensor:
    """The codes that ``_pack`` was given."""
    shifts = 4 * torch.arange(_CODES)
    return ((packed[..., None] >> shifts & 15) - 8).flatten(1).to(torch.int8)


def _described(scheme: Scheme) -> str:
    scales = "row" if scheme.group is None else f"{scheme.group} weights"
    inputs = "" if scheme.input_bits is None else f", inputs of {scheme.input_bits} bits with a scale per token"
    return f"weights of {scheme.bits} bits with a scale per {scales}{inputs}"
