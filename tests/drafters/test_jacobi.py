"""Jacobi decoding: the guesses of a pass are the next draft, and answers are the target's own."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.jacobi import Jacobi
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama, transformers_greedy


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6)], ids=["greedy", "sampled"])
@torch.inference_mode()
def test_a_draft_is_what_the_target_said_after_the_guesses_before(target, sampling):
    prompt = random_prompts(1, [6])[0]
    result = Decoder(target, Jacobi(), 4, sampling, trace=True).generate(prompt, 30)
    text = prompt + result.tokens[:1]
    expected = [text[-1]] * 4  # nothing is known yet
    for turn, accepted in zip(result.trace.rounds, result.accepted, strict=True):
        assert turn.drafted == expected[: len(turn.drafted)]
        after = target.model(torch.tensor([text + turn.drafted])).logits[0, len(text) - 1 :].argmax(-1).tolist()
        text = (prompt + result.tokens)[: len(text) + accepted + 1]
        expected = after[accepted + 1 :]
        expected += text[-1:] * (4 - len(expected))


@pytest.mark.parametrize("shape", [5, StaticTree(((0,), (1,), (0, 0))), DynamicTree(3, 2, 6)], ids=str)
def test_answers_are_the_targets_own_beside_others_as_alone(target, shape):
    prompts = random_prompts(7, [1, 2, 9])
    decoder = Decoder(target, Jacobi(), shape)
    together = decoder.generate_batch(prompts, 87, 3)  # to the end of the context
    assert [each.tokens for each in together] == transformers_greedy(target.model, prompts, 87)
    alone = [decoder.generate(prompt, 87) for prompt in prompts]
    assert [each.accepted for each in together] == [each.accepted for each in alone]
    assert sum(map(sum, (each.accepted for each in alone))) > 20
