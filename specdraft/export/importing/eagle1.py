"""Public EAGLE-1 heads (EAGLE-2 is the same head): EAGLE's own layout, which vLLM and SGLang load.

H = hidden size of head and target. Embedding and projection are the target's: what files hold of them must be it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from specdraft.drafters.eagle import Eagle
from specdraft.errors import UserError
from specdraft.export.eagle3 import LLAMA, layer_shapes
from specdraft.export.importing.shared import check_sizes, drop_borrowed, layer_shape, refuse_layers
from specdraft.export.layout import check_tensors
from specdraft.targets import Target

_LAYER = "layers.0"


def read_eagle(
    config: Mapping[str, Any], files: Mapping[str, Tensor], target: Target, layers: Sequence[int] | None
) -> Eagle:
    """The head of these files, weights in fp32, bound to ``target``. A bias of zeros, as SGLang wants it, is none.
    Raises UserError for files of another target, of a head that ours does not represent, and for ``layers``."""
    refuse_layers(layers, "an EAGLE-1 head reads")
    check_sizes(target, config, ("hidden_size", "vocab_size"), "a head")
    tensors = {name.removeprefix("model."): tensor for name, tensor in files.items() if "rotary_emb" not in name}
    drop_borrowed(target, tensors, "an EAGLE-1 head")
    if "fc.bias" in tensors and not tensors["fc.bias"].any():
        del tensors["fc.bias"]
    _check_represented(config, tensors)
    arguments = layer_shape({**config, "qk_norm": False}, target)
    for name in ("draft_vocab_size", "num_layers", "sliding_window"):
        del arguments[name]
    shape, h = arguments | {"attention_bias": False, "model_type": LLAMA[1]}, target.hidden_size
    expected = {"fc.weight": (h, 2 * h), **layer_shapes(shape, _LAYER, h)}
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    check_tensors("an EAGLE-1 head", floats, expected, "float32")
    head = Eagle(**arguments)
    head.load_state_dict({name: floats[name.replace("midlayer", _LAYER)] for name in head.state_dict()})
    head.bind(target)
    return head.eval()


def _check_represented(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    found = [f"hidden_act={config['hidden_act']}"] if config.get("hidden_act") not in (None, "silu") else []
    found += ["layers that see a window"] if "sliding_attention" in (config.get("layer_types") or ()) else []
    found += ["several layers"] if (config.get("num_hidden_layers") or 1) != 1 else []
    biases = sorted(name.removesuffix(".bias") for name in tensors if name.endswith(".bias"))
    found += [f"a bias in {', '.join(biases)}"] if biases else []
    found += ["a norm before its attention"] if f"{_LAYER}.input_layernorm.weight" in tensors else []
    if found:
        wrong = f"the head has {', '.join(found)}, which specdraft's EAGLE-1 does not represent"
        raise UserError(f"{wrong}: expected one layer as EAGLE's own, without biases; train a head of your own")
