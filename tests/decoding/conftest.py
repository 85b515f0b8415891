"""One tiny target for all, with transformers' own answers to 24 prompts."""

from typing import NamedTuple

import pytest
import torch

from specdraft.drafters.eagle import Eagle3
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

PROMPTS, NEW_TOKENS = 24, 64


class Answers(NamedTuple):
    """Prompts and their greedy continuations of ``NEW_TOKENS`` and a few more, for drafts that look ahead."""

    prompts: list[list[int]]
    continuations: list[list[int]]


@pytest.fixture(autouse=True, scope="module")
def every_layer_packed(small_layers_packed_too):
    """As those of real models are."""


@pytest.fixture(scope="session")
def target() -> Target:
    return Target.from_model(tiny_llama())


@pytest.fixture(scope="session")
def answers(target) -> Answers:
    prompts = random_prompts(PROMPTS, lengths=[1, 2, 3, 5, 8, 13, 16, 21])
    return Answers(prompts, transformers_greedy(target.model, prompts, NEW_TOKENS + 8))


@pytest.fixture(scope="session")
def untrained():
    """Build an EAGLE-3 head that nobody trained; it is right now and then, since texts stand still now and then."""

    def build(target: Target) -> Eagle3:
        torch.manual_seed(0)
        head = Eagle3.for_target(target, None, layers=(1,))
        with torch.no_grad():
            head.fc.weight.copy_(torch.eye(target.hidden_size))
        return head

    return build
