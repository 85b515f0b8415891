"""Attention by document is what explicit masks give, and is left to architectures that ask for nothing else."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdraft.targets import LanguageModel
from specdraft.targets.packed_attention import can_pack, packing
from tests.families import FAMILIES

LENGTHS = (5, 7, 3, 8, 1)


def packed(rows=2):
    ids = torch.randint(61, (rows, 24 // rows), generator=torch.Generator().manual_seed(3))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS]).view(rows, -1)


def features_and_gradients(model, ids, positions):
    features = model.features(ids, positions, (1, 3))
    weights = torch.randn(features.last.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    parameters = list(model.decoder.parameters())
    return [*features, *torch.autograd.grad((features.last * weights).sum(), parameters)]


def test_the_features_of_explicit_masks_with_their_gradients(family):
    """``family``: every architecture, whether it is packed or not."""
    model, masked = LanguageModel(family.build()), LanguageModel(family.build())
    masked._packs = masked._separates_documents = False
    if model.config._attn_implementation == "sdpa":
        assert model._packs == can_pack(model.config, model.device, model.dtype)
    parts = (features_and_gradients(each, *packed()) for each in (model, masked))
    for mine, expected in zip(*parts, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == masked.config._attn_implementation


class Largest(TorchDispatchMode):
    """``elements``: of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def test_no_mask_is_made():
    model = LanguageModel(FAMILIES["llama"].build())
    assert model._packs
    lengths = [8] * 64
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.inference_mode(), Largest() as largest:
        model.features(positions % 61, positions)
    assert largest.elements < 512 * 512


def test_what_asks_for_more_is_left_to_masks():
    plain = {"_attn_implementation": "sdpa", "layer_types": ["full_attention"]}
    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    def packs(device=cpu, dtype=torch.float32, **changes):
        return can_pack(SimpleNamespace(**plain | changes), device, dtype)

    assert packs() and packs(layer_types=None) and packs(sliding_window=None)
    assert not packs(_attn_implementation="eager")
    assert not packs(layer_types=["full_attention", "sliding_attention"])
    assert not packs(sliding_window=4096) and not packs(attn_logit_softcapping=50.0)
    assert not packs(attention_dropout=0.1)
    assert not packs(gpu) and not packs(torch.device("meta"))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_on_a_gpu_half_precision_is_packed(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = SimpleNamespace(_attn_implementation="sdpa", layer_types=None)
    for dtype in (torch.bfloat16, torch.float16):
        assert can_pack(config, torch.device("cuda"), dtype) == (capability >= (8, 0))
    assert not can_pack(config, torch.device("cuda"), torch.float32)


def test_the_implementation_is_given_back_when_a_pass_fails():
    config = SimpleNamespace(_attn_implementation="sdpa")
    with pytest.raises(ZeroDivisionError), packing(config, torch.tensor([[0, 1, 0, 1, 2]])) as given:
        assert given["attend"].args == ([0, 2, 1 / 0 if config._attn_implementation != "sdpa" else 5],)
    assert config._attn_implementation == "sdpa"
