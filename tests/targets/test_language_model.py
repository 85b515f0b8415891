"""A trainable language model: gradients flow, cached steps are its own forward, and its weights stay where they are."""

import pytest
import torch

from specdraft.targets import LanguageModel
from tests.families import LENGTH

# Norms and rotary angles are computed in fp32 even in an fp64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def model(family) -> LanguageModel:
    return LanguageModel(family.build())


def columns(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def test_gradients_reach_every_weight(model, ids):
    features = model.features(ids, columns(ids))
    # Every expert of a mixture is chosen by some token here, and the last norm's output goes through the head.
    (model.logits(features.last) * torch.randn(61, dtype=torch.float64)).sum().backward()
    without = [name for name, p in model.model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def test_logits_are_the_models_own(model, ids):
    model.check_logits()
    expected = model.model(ids, use_cache=False).logits
    ours = model.logits(model.features(ids, columns(ids)).last)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_rows_of_different_lengths_go_on_side_by_side(model, ids):
    """As on-policy sampling does it: a padded first pass, cut to each row's length, then a token a time."""
    lengths = torch.tensor([LENGTH - 8, 5])
    cache = model.new_cache(4)
    model.step(ids[:, : LENGTH - 8], cache)
    for row, length in enumerate(lengths.tolist()):
        cache.keep(row, length, ())
    whole = model.features(ids, columns(ids)).last
    for step in range(3):
        positions = (lengths + step)[:, None]
        visible = (torch.arange(cache.length + 1) <= positions)[:, None]
        last = model.step(ids.gather(1, positions), cache, (), positions, visible).last[:, 0]
        torch.testing.assert_close(last, whole[torch.arange(2), lengths + step], **CLOSE)


def test_it_is_a_view_of_the_model(model):
    assert not isinstance(model, torch.nn.Module)
    assert all(parameter.requires_grad for parameter in model.model.parameters())
    model.model.float()
    assert model.dtype == torch.float32
