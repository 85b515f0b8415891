"""A language model without some of its layers: what self-speculation drafts with.

It has no weights of its own, and takes the caches of the whole model: the layers that it runs read and write theirs."""

import copy
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from specdraft.targets.language_model import LanguageModel


def without_layers(model: LanguageModel, skipped: Collection[int], final_norm: bool = True) -> LanguageModel:
    """``model`` without the ``skipped`` layers (numbers from 0): what enters one leaves it as it is. Head and all else
    are the model's own, and so is the final norm, unless the last hidden states are to be those before it."""
    partial = LanguageModel(model.model)
    layers = list(model.decoder.layers)
    end = 1 + max(set(range(len(layers))) - set(skipped), default=-1)  # of the layers that are run
    # Models ask for a layer's kind by its number or at the layer: those that are skipped keep their place and kind.
    kept = [_passing(layer) if number in skipped else layer for number, layer in enumerate(layers[:end])]
    decoder = copy.copy(model.decoder)
    norm = decoder.norm if final_norm else nn.Identity()
    decoder.__dict__["_modules"] = {**decoder._modules, "layers": nn.ModuleList(kept), "norm": norm}
    # transformers would hang hooks for hidden states on layers that the whole model hangs its own on.
    decoder._output_capturing_hooks_installed = True
    partial.decoder = decoder
    return partial


def _passing(layer: nn.Module) -> nn.Module:
    passing = copy.copy(layer)
    passing.forward = _pass
    return passing


def _pass(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states
