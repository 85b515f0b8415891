"""Requests that are drafted for together: each gets the draft, and goes on with the state, that it would have alone."""

import functools

import pytest
import torch

from specdraft.decoding.cache import CachesSideBySide, RewindableCache
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.base import Drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import Eagle, Eagle3
from specdraft.drafters.heads import Heads
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.targets import Features, Target
from tests.families import FAMILIES, V

VOCABULARY = torch.arange(3, V, 2)
BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)))
SHAPES = [StaticTree.chain(4), BUSH, DynamicTree(4, 3, 12)]
KINDS = {
    "eagle": lambda target: Eagle.for_target(target),
    "eagle3": lambda target: Eagle3.for_target(target, VOCABULARY, layers=(1, 2)),
    "eagle3_1": lambda target: Eagle3.for_target(target, None, layers=(1, 2), fc_norm=True, norm_output=True),
    "medusa": lambda target: Medusa.for_target(target, VOCABULARY, num_heads=3),  # fewer levels than are asked for
    "hydra": lambda target: Hydra.for_target(target, VOCABULARY, num_heads=4),
    "draft_model": lambda target: DraftModel.for_target(target, copy_layers=2),
    "draft_model, windows": lambda target: DraftModel.for_target(target, copy_layers=2),
    "prompt_lookup": lambda target: PromptLookup(),
}
# Norms and rotary angles of transformers' models are computed in fp32 even in an fp64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = [9, 2, 5, 1]  # of the prompts
ROUNDS = [[1, 4, 2, 5], [3, 1, 1, 2], [1, 1, 1, 1], [5, 2, 4, 3]]  # tokens emitted by each request


torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@functools.cache
def target_of(family: str) -> Target:
    return Target.from_model(FAMILIES[family].build())


def drafter_for(kind: str) -> Drafter:
    torch.manual_seed(0)
    target = target_of("mistral" if "windows" in kind else "llama")
    drafter = KINDS[kind](target).double()
    with torch.no_grad():  # large random weights: every part must matter
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    drafter.bind(target)
    return drafter


class Texts:
    """Random texts that grow, and what a drafter is told of their growth."""

    def __init__(self, drafter: Drafter) -> None:
        self.target, self.layers = drafter.target, drafter.layers
        self.g = torch.Generator().manual_seed(2)
        self.texts = [self.random(length) for length in LENGTHS]
        self.told = [1] * len(LENGTHS)  # tokens of each that the drafter knows: ``start`` tells the first

    def random(self, count: int) -> torch.Tensor:
        return torch.randint(V, (count,), generator=self.g)

    def grow(self, counts: list[int]) -> tuple[list[torch.Tensor], list[Features]]:
        """Emit as many tokens; -> what each drafter has not yet been told, and the features of the positions before."""
        tokens, features = [], []
        for number, count in enumerate(counts):
            begin = self.told[number]
            text = self.texts[number] = torch.cat([self.texts[number], self.random(count)])
            known = self.target.features(text[None, :-1], torch.arange(len(text) - 1)[None], self.layers)
            tokens.append(text[begin:])
            features.append(Features(*(part[:, begin - 1 :] for part in known)))
            self.told[number] = len(text)
        return tokens, features


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_k=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_drafts_and_states_are_those_of_requests_alone(kind, shape, sampling):
    drafter = drafter_for(kind)
    texts = Texts(drafter)
    alone, together = ([drafter.start(int(text[0]), 4) for text in texts.texts] for _ in range(2))
    shapes = [shape.truncate(depth) for depth in (4, 1, 3, 4)]  # one ends with its first level
    drafted = 0
    for number, counts in enumerate([[1, 1, 1, 1], *ROUNDS]):
        tokens, features = texts.grow(counts)
        for each in zip(alone, tokens, features, strict=True):
            drafter.advance(*each)
        drafter.advance_batch(together, tokens, features)
        one_by_one, at_once = (
            [torch.Generator().manual_seed(10 * number + request) for request in range(len(LENGTHS))] for _ in range(2)
        )
        expected = [drafter.draft(*each[:2], sampling, each[2]) for each in zip(alone, shapes, one_by_one, strict=True)]
        for one, other in zip(expected, drafter.draft_batch(together, shapes, sampling, at_once), strict=True):
            assert torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)
            assert (one.q is None) == (other.q is None)
            if one.q is not None:
                torch.testing.assert_close(one.q, other.q, **CLOSE)
            drafted += len(one)
    assert drafted > (0 if kind == "prompt_lookup" else 40)


def passes_of(drafter: Drafter, monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of what the drafter reads from now on, pass by pass."""
    reader = drafter.language_model if isinstance(drafter, DraftModel) else drafter
    name = "step" if isinstance(drafter, DraftModel) else "hidden" if isinstance(drafter, Heads) else "_read"
    read, passes = getattr(reader, name), []

    def watched(*args, **kwargs):
        passes.append(tuple(args[-1 if isinstance(drafter, Heads) else 0].shape))
        return read(*args, **kwargs)

    monkeypatch.setattr(reader, name, watched)
    return passes


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "prompt_lookup"])
@torch.inference_mode()
def test_a_batch_is_read_in_as_many_passes_as_a_request(kind, monkeypatch):
    drafter = drafter_for(kind)
    passes = passes_of(drafter, monkeypatch)
    found = []
    for count in (1, 4):
        texts = Texts(drafter)
        states = [drafter.start(int(text[0]), 32) for text in texts.texts[:count]]
        for counts in ([1, 1, 1, 1], [2, 3, 1, 2]):
            passes.clear()  # those of the second round count
            tokens, features = texts.grow(counts)
            drafter.advance_batch(states, tokens[:count], features[:count])
            drafter.draft_batch(states, [StaticTree.chain(3)] * count, Sampling(), [None] * count)
        found.append(len(passes))
    assert found == [3, 3]


@torch.inference_mode()
def test_a_draft_model_pads_no_request_to_the_prompt_of_another(monkeypatch):
    drafter = drafter_for("draft_model")
    texts = Texts(drafter)
    states = [drafter.start(int(text[0]), 32) for text in texts.texts]
    drafter.advance_batch(states, *texts.grow([1, 1, 1, 1]))
    passes = passes_of(drafter, monkeypatch)
    drafter.draft_batch(states, [StaticTree.chain(1)] * 4, Sampling(), [None] * 4)
    assert passes == [(1, 9), (1, 2), (1, 5), (1, 1), (4, 1)]


def test_caches_side_by_side_go_on_as_caches_of_their_own():
    g = torch.Generator().manual_seed(0)
    caches = [RewindableCache(2, 2) for _ in range(3)]
    held: list[list[torch.Tensor]] = [[] for _ in caches]  # [heads, n, d] of what each holds
    for number, counts in enumerate([[3, 0, 1], [2, 2, 2], [1, 1, 1]]):
        if number == 0:  # alone, so that they differ in length; the second holds nothing yet
            for row, count in enumerate(counts):
                added = torch.randn(1, 2, count, 4, generator=g)
                held[row].append(added[0])
                for layer in range(2) if count else ():
                    caches[row].update(added, -added, layer)
            continue
        together = CachesSideBySide(caches)
        before = [sum(part.shape[1] for part in parts) for parts in held]
        assert together.lengths == before and together.get_seq_length() == max(before)
        added = torch.randn(3, 2, counts[0], 4, generator=g)
        for row in range(3):
            held[row].append(added[row])
        for layer in range(2):
            keys, values = together.update(added, -added, layer)
            assert keys.shape == values.shape == (3, 2, max(before) + counts[0], 4)
            for row, parts in enumerate(held):
                expected = torch.cat(parts, dim=1)
                assert torch.equal(keys[row, :, : expected.shape[1]], expected)
                assert torch.equal(values[row, :, : expected.shape[1]], -expected)
    assert [cache.length for cache in caches] == [6, 3, 4]
