"""Tokens that ride along in the target's pass: what it says after them, and that nothing else changes by it."""

import pytest
import torch
from torch import Tensor

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Riders, Texts
from specdraft.decoding.requests import Requests
from specdraft.decoding.shapes import DynamicTree, Shape, StaticTree
from specdraft.drafters.token_recycling import RecyclingDrafting, TokenRecycling
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES, V

BUSH = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
SHAPES = [StaticTree.chain(3), BUSH, DynamicTree(3, 2, 6)]
# Two branches, of three tokens and of two; their last tokens, which are asked for, come first.
PATHS = [[2, 3, 0], [4, 1]]
OFFSETS = [3, 2, 1, 2, 1]
SEEN = [[0, 2, 3], [1, 4], [2], [2, 3], [4]]


class Carrying(TokenRecycling):
    def drafting(self, rows: int, capacity: int) -> "CarryingDrafting":
        return CarryingDrafting(self, rows)


class CarryingDrafting(RecyclingDrafting):
    """Other tokens ride along with every request and in every round."""

    def num_read(self, shape: Shape) -> int:
        return shape.num_nodes + len(OFFSETS)

    def ride(self, texts: Texts) -> Riders:
        self.tokens = (7 * texts.lengths[:, None] + 3 * torch.arange(len(OFFSETS))) % V
        seen = torch.tensor([[other in sees for other in range(len(SEEN))] for sees in SEEN])
        parts = (part.expand(len(self.tokens), *part.shape) for part in (torch.tensor(OFFSETS), seen))
        return Riders(self.tokens, *parts, asked=len(PATHS))

    def hear(self, logits: Tensor) -> None:
        self.heard = logits


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])  # no windows, windows, windows in some layers
def target(request):
    return Target.from_model(FAMILIES[request.param].build())


@torch.inference_mode()
def test_the_target_says_what_follows_the_text_and_what_they_see(target):
    """Requests of different lengths, drafts of which some are accepted, windows."""
    batch, prompts = Requests(Decoder(target, Carrying(), BUSH), 3, 60), random_prompts(3, [9, 2, 5], V)
    for number, prompt in enumerate(prompts):
        batch.begin(number, prompt, 40, number)
    for _ in range(4):
        texts = [prompt + each.result.tokens for prompt, each in zip(prompts, batch.under_way, strict=True)]
        batch.round()
        assert batch.drafting.heard.shape == (3, 2, V)
        for row, text in enumerate(texts):
            for found, path in zip(batch.drafting.heard[row], PATHS, strict=True):
                whole = text + [int(batch.drafting.tokens[row, rider]) for rider in path]
                expected = target.model(torch.tensor([whole])).logits[0, -1]
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_answers_and_counts_are_those_without_them(target, shape):
    prompts = random_prompts(3, [3, 7, 12], V)
    found = Decoder(target, Carrying(), shape).generate_batch(prompts, 9, 2)
    assert [each.tokens for each in found] == transformers_greedy(target.model, prompts, 9)
    plain = Decoder(target, TokenRecycling(), shape).generate_batch(prompts, 9, 2)
    for name in ("drafted", "accepted", "nodes"):
        assert [getattr(each, name) for each in found] == [getattr(each, name) for each in plain]


@pytest.fixture(scope="module")
def short():
    return Target.from_model(tiny_llama(V, context=30))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_to_the_end_of_the_context(short, batch_size):
    prompts = random_prompts(4, [29, 3, 20], V)
    found = Decoder(short, Carrying(), BUSH).generate_batch(prompts, 40, batch_size)
    for prompt, each in zip(prompts, found, strict=True):
        assert each.tokens == transformers_greedy(short.model, [prompt], 30 - len(prompt))[0]


def test_drafts_that_see_them_change_the_answer(short, monkeypatch):
    beside = Riders.beside

    def seen_by_drafts(riders: Riders, seen: Tensor) -> Tensor:
        both = beside(riders, seen)
        both[:, : seen.shape[1], seen.shape[1] :] = True
        return both

    prompts = random_prompts(3, [3, 9], V)
    right = transformers_greedy(short.model, prompts, 15)
    decoder = Decoder(short, Carrying(), BUSH)
    assert [each.tokens for each in decoder.generate_batch(prompts, 15, 3)] == right
    monkeypatch.setattr(Riders, "beside", seen_by_drafts)
    assert [each.tokens for each in decoder.generate_batch(prompts, 15, 3)] != right
