"""Requests that are drafted for together: each gets the draft, and goes on with the state, that it would have alone."""

import functools

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.generation import Generation
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import DynamicTree, ForcedPath, StaticTree
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters.base import Drafter
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.drafting import SingleDrafter
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.heads import Heads
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.redrafter import ReDrafter
from specdraft.drafters.suffix import Suffix
from specdraft.targets import Features, Target
from tests.drafters.conversations import LENGTHS, Conversations
from tests.drafters.tli.drafts import translating
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES, V

VOCABULARY = torch.arange(3, V, 2)
BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)))
FORCED = ForcedPath(torch.randint(V, (4, 3), generator=torch.Generator().manual_seed(0)), 4)
SHAPES = [StaticTree.chain(4), BUSH, DynamicTree(4, 3, 12), FORCED]
KINDS = {
    "eagle": lambda target: Eagle.for_target(target),
    "eagle3": lambda target: Eagle3.for_target(target, VOCABULARY, layers=(1, 2)),
    "eagle3_1": lambda target: Eagle3.for_target(target, None, layers=(1, 2), fc_norm=True, norm_output=True),
    "medusa": lambda target: Medusa.for_target(target, VOCABULARY, num_heads=3),  # fewer levels than are asked for
    "hydra": lambda target: Hydra.for_target(target, VOCABULARY, num_heads=4),
    "redrafter": lambda target: ReDrafter.for_target(target, VOCABULARY),
    "mtp": lambda target: MTP.for_target(target),
    "p_eagle": lambda target: PEagle.for_target(target, VOCABULARY, layers=(1, 2), num_layers=2, ttt_steps=4),
    "dflash": lambda target: DFlash.for_target(target, VOCABULARY, layers=(1, 2), num_layers=2, block_size=4),
    "dspark": lambda target: DSpark.for_target(target, VOCABULARY, layers=(1, 2), num_layers=1, block_size=4),
    "domino": lambda target: Domino.for_target(target, VOCABULARY, layers=(1, 2), num_layers=1, block_size=4),
    "draft_model": lambda target: DraftModel.for_target(target, copy_layers=2),
    "draft_model, windows": lambda target: DraftModel.for_target(target, copy_layers=2),
    "pard": lambda target: Pard.for_target(target, copy_layers=2, num_drafts=4),
    "tli_draft": translating,
    "prompt_lookup": lambda target: PromptLookup(),
    "suffix": lambda target: Suffix(max_cached_requests=0),  # what requests know of each other is tested with it
}
KINDS["hybrid"] = lambda target: Hybrid(KINDS["medusa"](target), PromptLookup(), min_tokens=1)
TEXT_ALONE = ("prompt_lookup", "suffix")
# Norms and rotary angles of transformers' models are computed in fp32 even in an fp64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
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


def same(one: tuple, other: tuple) -> None:
    for part in range(2):
        assert torch.equal(one[part], other[part])
    assert (one[2] is None) == (other[2] is None)
    if one[2] is not None:
        torch.testing.assert_close(one[2], other[2], **CLOSE)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.3, top_k=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__ + str(shape.depth))
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_drafts_and_states_are_those_of_requests_alone(kind, shape, sampling):
    """Also when one ends, another takes its row, and a new one begins."""
    drafter = drafter_for(kind)
    numbers = range(len(LENGTHS))
    together, alone = Conversations(drafter, [0, 1, 2]), {}
    drafted = 0
    for round_, counts in enumerate(ROUNDS):
        if round_ == 2:
            together.drop(0)
            together.begin(3)
        for number in together.numbers:
            if number not in alone:
                alone[number] = Conversations(drafter, [number])
        for number, found in together.draft(shape, sampling).items():
            same(alone[number].draft(shape, sampling)[number], found)
            drafted += len(found[0])
        emitted = dict(zip(numbers, counts, strict=True))
        together.emit(emitted)
        for number in together.numbers:
            alone[number].emit(emitted)
    assert set(together.numbers) == {1, 2, 3}
    assert drafted > (0 if kind in TEXT_ALONE else 30)


def decoded(drafter: Drafter, shape, sampling: Sampling, batch_size: int) -> list[Generation]:
    """Three answers, of which two end with the context, while the third has room."""
    prompts = random_prompts(3, [drafter.target.max_length - length for length in (6, 50, 2)], V)
    return Decoder(drafter.target, drafter, shape, sampling).generate_batch(prompts, 10, batch_size)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=lambda shape: type(shape).__name__ + str(shape.depth))
@pytest.mark.parametrize("kind", KINDS)
def test_at_the_end_of_the_context_a_batch_is_decoded_as_each_alone(kind, shape):
    """No draft runs past it, though drafts are made together."""
    drafter = drafter_for(kind)
    together, alone = (decoded(drafter, shape, Sampling(), size) for size in (3, 1))
    assert [len(each.tokens) for each in together] == [6, 10, 2]
    for one, other in zip(together, alone, strict=True):
        assert (one.tokens, one.drafted, one.accepted) == (other.tokens, other.drafted, other.accepted)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_at_the_end_of_the_context_draws_are_those_of_requests_alone(shape):
    drafter = drafter_for("medusa")
    together, alone = (decoded(drafter, shape, Sampling(1.0, top_k=9), size) for size in (3, 1))
    assert [each.tokens for each in together] == [each.tokens for each in alone]


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_a_dynamic_tree_may_read_more_nodes_than_it_keeps(kind):
    target = Target.from_model(tiny_llama(context=200, num_hidden_layers=3))
    drafter = KINDS[kind](target)
    prompts = random_prompts(1, [100])
    found = Decoder(target, drafter, DynamicTree(8, 10, 2)).generate(prompts[0], 25)
    assert [found.tokens] == transformers_greedy(target.model, prompts, 25)


def passes_of(drafter: Drafter, monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of what the drafter reads from now on, pass by pass."""
    reader = drafter.language_model if isinstance(drafter, DraftModel) else drafter
    name = "step" if isinstance(drafter, DraftModel) else "hidden" if isinstance(drafter, Heads) else "read"
    read, passes = getattr(reader, name), []

    def watched(*args, **kwargs):
        given = args[-1] if isinstance(drafter, Heads) else args[0]
        passes.append(tuple(getattr(given, "ids", given).shape))
        return read(*args, **kwargs)

    monkeypatch.setattr(reader, name, watched)
    return passes


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*TEXT_ALONE, "hybrid")])
@torch.inference_mode()
def test_a_batch_is_read_in_as_many_passes_as_a_request(kind, monkeypatch):
    drafter = drafter_for(kind)
    passes = passes_of(drafter, monkeypatch)
    found = []
    for count in (1, 4):
        together = Conversations(drafter, list(range(count)))
        passes.clear()
        together.emit({number: (2, 3, 1, 2)[number] for number in range(count)})
        together.draft(StaticTree.chain(3), Sampling())
        found.append(len(passes))
    alone = {"dflash": 1, "dspark": 1, "domino": 1, "p_eagle": 2, "pard": 2}.get(kind, 3)
    assert found == [alone, alone]


@torch.inference_mode()
def test_a_draft_model_pads_no_request_to_the_prompt_of_another(monkeypatch):
    drafter = drafter_for("draft_model")
    passes = passes_of(drafter, monkeypatch)
    together = Conversations(drafter, [0, 1, 2, 3])
    assert passes == [(1, length + 1) for length in LENGTHS]
    together.draft(StaticTree.chain(2), Sampling())
    assert passes[4:] == [(4, 1)]


class Noting(SingleDrafter):
    """Drafts as many tokens as its request has emitted, and notes what it is told."""

    def __init__(self, sampled: bool = False) -> None:
        super().__init__()
        self.sampled = sampled

    def start(self, first_token, max_length):
        return {"text": [first_token], "room": max_length, "features": []}

    def advance(self, state, tokens, features):
        state["text"] += tokens.tolist()
        state["features"].append(features)

    def draft(self, state, shape, sampling, chance):
        size = min(len(state["text"]), shape.depth)
        tokens = torch.tensor([state["text"][:size]])
        self.told = shape, sampling, chance
        q = torch.eye(10)[tokens] if len(state["text"]) % 2 and self.sampled else None
        return DraftTrees.chains(tokens, q)


def test_requests_of_a_single_drafter_are_told_and_asked_one_by_one():
    drafter = Noting()
    drafting = drafter.drafting(3, 50)
    features = Features(torch.arange(24.0).view(2, 4, 3), torch.arange(16.0).view(2, 4, 2))
    for row in range(2):
        drafting.begin(row, row + 1)
    drafting.advance(
        Texts(torch.ones(2), 1), torch.tensor([[3, 4, 5, 0], [6, 0, 0, 0]]), torch.tensor([3, 1]), features
    )
    one, other = drafting.states[:2]
    assert (one["text"], other["text"], one["room"]) == ([1, 3, 4, 5], [2, 6], 50)
    assert torch.equal(one["features"][0].aux, features.aux[:1, :3])
    assert torch.equal(other["features"][0].last, features.last[1:, :1])
    chance = Chance(torch.tensor([5, 6]), torch.tensor([4, 2]))
    trees = drafting.draft(Texts(torch.tensor([4, 2]), 4), StaticTree.chain(3), Sampling(1.0), chance)
    assert trees.tokens.tolist() == [[1, 3, 4], [2, 6, 0]] and trees.alive.tolist() == [[True] * 3, [True, True, False]]
    shape, sampling, own = drafter.told
    assert shape == StaticTree.chain(3) and sampling == Sampling(1.0)
    assert torch.equal(own.uniform(0, 4), chance.uniform(0, 4)[1:])
    path = torch.tensor([[7, 8], [9, 1]])
    drafting.draft(Texts(torch.tensor([4, 2]), 4), ForcedPath(path, 3), Sampling(), None)
    assert drafter.told[0].tokens.tolist() == [[9, 1]] and drafter.told[2] is None
    # A request that begins beside another; then the first one ends.
    drafting.begin(2, 9)
    drafting.advance(Texts(torch.ones(1), 1, 2), torch.tensor([[4, 4]]), torch.tensor([2]), features)
    drafting.drop(0, 2, 3)
    assert [state and state["text"] for state in drafting.states] == [[9, 4, 4], [2, 6], None]


def test_drawn_and_chosen_drafts_of_one_batch_are_joined():
    drafting = Noting(sampled=True).drafting(2, 50)
    features = Features(torch.zeros(2, 2, 3), torch.zeros(2, 2, 3))
    for row in range(2):
        drafting.begin(row, row + 1)
    drafting.advance(Texts(torch.ones(2), 1), torch.tensor([[3, 4], [6, 0]]), torch.tensor([2, 1]), features)
    trees = drafting.draft(Texts(torch.tensor([3, 2]), 3), StaticTree.chain(4), Sampling(1.0), None)
    assert trees.tokens.tolist() == [[1, 3, 4], [2, 6, 0]] and trees.parents.tolist()[0] == [-1, 0, 1]
    chosen = torch.nn.functional.one_hot(torch.tensor([2, 6]), 10).float()  # a chosen token is a point mass
    assert torch.equal(trees.q[1, :2], chosen) and torch.equal(trees.q[0].argmax(-1), trees.tokens[0])
