"""The search for layers that a target can do without finds those that do nothing."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.early_exit import EarlyExit
from specdraft.drafters.layer_search import search_layers
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama

IDLE = {1, 4}


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(num_hidden_layers=6)
    with torch.no_grad():
        for number in IDLE:
            layer = model.model.layers[number]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return Target.from_model(model)


def test_layers_that_do_nothing_are_found(target):
    text = torch.tensor(random_prompts(1, [30])[0])
    with pytest.warns(UserWarning, match=r"skips 2 of 6 layers: 100% of .*drafter.skip_layers=\[1, 4\] names them"):
        assert search_layers(target, 2, text) == IDLE
    with pytest.warns(UserWarning, match="skips 5 of 6"):
        assert len(search_layers(target, 5, text, tries=2)) == 5


def test_drafting_begins_with_the_search_and_keeps_what_it_found(target):
    drafter = EarlyExit(skip_layers=2)
    decoder = Decoder(target, drafter, 3)
    with pytest.warns(UserWarning, match="drafter.skip_layers="):
        result = decoder.generate(random_prompts(1, [9])[0], 20)
    assert result.accepted[:-1] == result.drafted[:-1]  # nothing is missing
    found = drafter.model
    drafter.forget()
    Decoder(target, drafter, 3).generate([1, 2, 3], 4)
    assert drafter.model is found
