"""Every tested architecture, decoded with passes that are one graph each: the tokens of eager decoding, every one."""

import warnings

import pytest
import torch

from specdraft.decoding import compilation
from specdraft.decoding.compilation import compiling
from specdraft.decoding.decoder import Decoder
from specdraft.drafters.medusa import Medusa
from tests.fakes import random_prompts
from tests.families import V

pytestmark = pytest.mark.slow


def test_compiled_equals_eager_token_by_token(target, monkeypatch):
    # Graphs that are run as they were found: what breaks one fails, and no compiler is waited for.
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prompts = random_prompts(3, [3, 9, 5], V)
    decoder = Decoder(target, Medusa.for_target(target, num_heads=3), 3)
    expected = [each.tokens for each in decoder.generate_batch(prompts, 16, 3)]
    with warnings.catch_warnings(), compiling(True):
        warnings.simplefilter("error", UserWarning)  # one tells of a function that stays eager
        found = [each.tokens for each in decoder.generate_batch(prompts, 16, 3)]
    assert found == expected
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 4  # the target and three heads
