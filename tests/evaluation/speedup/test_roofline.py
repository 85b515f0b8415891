"""The least that a step can take, from bytes, arithmetic and what probes measure."""

import pytest

from specdraft.evaluation.speedup.roofline import Roofline, measure_roofline
from specdraft.targets import Target
from tests.fakes import tiny_llama


def test_a_step_is_bound_by_memory_or_by_arithmetic():
    assert Roofline(bytes=6e9, flops=2e9, bandwidth=3e9, rate=1e12).step_seconds == 2.0
    assert Roofline(bytes=6e9, flops=2e12, bandwidth=3e12, rate=1e12).step_seconds == 2.0


def test_bytes_and_flops_are_those_of_the_weights_that_a_token_passes_through():
    model = tiny_llama(tie_word_embeddings=False)
    found = measure_roofline(Target.from_model(model))
    used = sum(parameter.numel() for parameter in model.parameters()) - model.get_input_embeddings().weight.numel()
    assert found.bytes == 4 * used and found.flops == 2 * used
    assert found.bandwidth > 1e6 and found.rate > 1e6
    halved = measure_roofline(Target.from_model(model.bfloat16()))
    assert halved.bytes == 2 * used


@pytest.mark.parametrize("name", ["engine", "server"])
def test_weights_in_several_places_have_no_roofline_of_one(name, monkeypatch):
    target = Target.from_model(tiny_llama())
    monkeypatch.setattr(target, name, object())
    assert measure_roofline(target) is None
