"""Prompts that are read once are answered as if each decoder had read them."""

import pytest

from read_once import read_once
from specdraft.decoding.decoder import Decoder
from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.targets import Target
from tests.fakes import tiny_llama

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [7, 8, 9, 10]]


@pytest.fixture
def target():
    return Target.from_model(tiny_llama(num_hidden_layers=6))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_and_drafts_stay_the_same_and_the_prompts_are_not_read_again(target, monkeypatch, batch_size):
    drafters = [None, PromptLookup(), Eagle.for_target(target), Eagle3.for_target(target)]
    layers = [layer for drafter in drafters[1:] for layer in drafter.layers]

    def decoded():
        return [
            [(each.tokens, each.accepted) for each in Decoder(target, drafter).generate_batch(PROMPTS, 12, batch_size)]
            for drafter in drafters
        ]

    plain, lengths, step = decoded(), [], Target.step

    def counting(target, reading, *rest):
        lengths.append(reading.held)
        return step(target, reading, *rest)

    monkeypatch.setattr(Target, "step", counting)
    with read_once(target, layers, [*PROMPTS, PROMPTS[0]]):
        read = len(lengths)
        assert decoded() == plain
    assert read == len(PROMPTS) and 0 not in lengths[read:]


def test_other_prompts_are_read_as_ever_and_afterwards_all_are(target):
    expected = Decoder(target).generate([3, 2, 1], 8).tokens
    with read_once(target, [], PROMPTS):
        assert Decoder(target).generate([3, 2, 1], 8).tokens == expected
    assert "step" not in vars(target)
