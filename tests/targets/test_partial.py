"""A target without some of its layers has no weights of its own, and leaves the target as it was."""

import torch

from specdraft.decoding import compilation
from specdraft.decoding.passes import Pass
from specdraft.targets import Target
from specdraft.targets.partial import without_layers
from tests.fakes import tiny_llama


@torch.inference_mode()
def test_the_target_stays_whole_and_its_layers_are_shared(monkeypatch):
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    target = Target.from_model(tiny_llama(num_hidden_layers=4))
    reading = Pass.prompt([3, 1, 4, 1, 5], target.device)

    def last(model):
        cache = target.new_cache(1, 8)
        model.step(reading, cache, (2,) if model is target else ())
        return model.step(Pass.text(torch.tensor([[7]]), torch.tensor([5]), 5, simple=True), cache).last

    before = last(target)
    partial = without_layers(target, {1, 3})
    found = last(partial)
    with compilation.compiling(True):  # graphs of both, and transformers' hooks for all hidden states
        for model, expected in ((partial, found), (target, before), (partial, found)):
            torch.testing.assert_close(last(model), expected)
            torch.testing.assert_close(last(model), expected)
    assert torch.equal(last(target), before) and not torch.allclose(found, before)
    assert len(partial.decoder.layers) == 3 and partial.decoder.layers[2] is target.decoder.layers[2]
    states = target.decoder(torch.tensor([[1, 2]]), output_hidden_states=True).hidden_states
    assert len(states) == 5
