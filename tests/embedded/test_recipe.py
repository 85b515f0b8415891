"""The schedule, and the target that ships: it is what the recipe builds, and a language model."""

import pytest
import torch

from specdraft.embedded.recipe import PEAK_LR, config, learning_rate
from specdraft.targets import Target


def test_the_learning_rate_warms_up_stays_and_falls():
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert rates[0] < rates[30] < rates[59] == PEAK_LR == rates[640]
    assert rates[650:] == sorted(rates[650:], reverse=True) and rates[-1] == pytest.approx(0.02 * PEAK_LR)


def test_the_target_that_ships_is_what_the_recipe_builds():
    target = Target.load("embedded://tiny", dtype="float32")
    expected = config(target.tokenizer)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "head_dim"):
        assert getattr(target.config, name) == getattr(expected, name)
    assert target.eos_token_ids == {target.tokenizer.eos_token_id}


def test_the_target_that_ships_is_a_language_model():
    target = Target.load("embedded://tiny", dtype="float32")
    ids = torch.tensor([target.tokenizer("    def __init__(self, name):\n        self.name = name\n")["input_ids"]])
    features = target.features(ids, torch.arange(ids.shape[1])[None], ())
    loss = torch.nn.functional.cross_entropy(target.logits(features.last[0, :-1]), ids[0, 1:])
    assert loss < 2.0, "a uniform guess would cost log(4096) = 8.3 nats"
