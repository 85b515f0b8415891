"""The decode loop with draft trees, and with requests side by side: transformers' tokens, exact counts, a clean cache.

What it emits when it samples is in ``test_decoder_sampling.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdraft.decoding import decoder as loop
from specdraft.decoding.cache import StaticCache
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.generation import Generation, truncate
from specdraft.decoding.passes import Pass
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import DynamicTree, Shape, StaticTree
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.drafters.draft_tree_builder import Level, Vocabulary, grow
from specdraft.drafters.drafting import LevelDrafting, SingleDrafter
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

V, NEW_TOKENS = 64, 32
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 0, 0)))
DYNAMIC = DynamicTree(4, 3, 12)
SHAPES = [STATIC, DYNAMIC]


@dataclass
class OracleState:
    """The text that will be emitted, and how much of it was."""

    first: int
    text: list[int] | None = None
    emitted: int = 0


class Oracle(SingleDrafter):
    """Knows what the target will say and hides it: token i of an answer is at rank ``RANKS[i % 5]`` of its siblings.

    Behind wrong tokens it says anything. Rank 9 is drafted by no shape here.
    """

    RANKS = (0, 1, 0, 2, 9)

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.texts = {tuple(prompt): list(answer) for prompt, answer in zip(prompts, answers, strict=True)}

    def start(self, first_token: int, max_length: int) -> OracleState:
        return OracleState(first_token)

    def advance(self, state: OracleState, tokens: Tensor, features: Features) -> None:
        if state.text is None:
            state.text = self.texts[(state.first, *tokens[:-1].tolist())]
            state.emitted = 1
        else:
            state.emitted += len(tokens)

    def draft(self, state: OracleState, shape: Shape, sampling: Sampling, chance: Chance | None) -> DraftTrees:
        assert state.text is not None
        text, emitted = state.text, state.emitted

        def logits(place: int, right: bool) -> Tensor:
            scores = torch.randn(V, generator=torch.Generator().manual_seed(place))
            if right and place < len(text):
                order = scores.argsort(descending=True)
                swapped = torch.tensor([int(order[self.RANKS[place % 5]]), text[place]])
                scores[swapped] = scores[swapped.flip(0)]
            return scores

        right = [True]

        def expand(level: Level) -> Tensor:
            nonlocal right
            true = text[emitted + level.depth - 1] if emitted + level.depth - 1 < len(text) else None
            above = [right[parent] for parent in level.parents[0].tolist()]
            right = [known and token == true for known, token in zip(above, level.tokens[0].tolist(), strict=True)]
            return torch.stack([logits(emitted + level.depth, known) for known in right])[None]

        return grow(logits(emitted, True)[None], expand, shape, sampling, chance, Vocabulary(V))


def drafted_prefix(shape: StaticTree, emitted: int) -> int:
    """How many of the oracle's right tokens the shape holds behind ``emitted`` tokens."""
    ranks = tuple(Oracle.RANKS[place % 5] for place in range(emitted, emitted + shape.depth))
    return max(depth for depth in range(shape.depth + 1) if depth == 0 or ranks[:depth] in shape.paths)


def check_counts(result: Generation, shape: Shape) -> None:
    """Counts explain the tokens, and no draft is larger than its shape."""
    assert len(result.drafted) == len(result.accepted) == len(result.nodes)
    most = shape.num_nodes
    for drafted, accepted, nodes in zip(result.drafted, result.accepted, result.nodes, strict=True):
        assert 0 <= accepted <= drafted <= min(shape.depth, nodes)
        assert nodes <= most
    emitted = 1 + len(result.accepted) + sum(result.accepted)
    assert 0 <= emitted - len(result.tokens) <= (result.accepted[-1] if result.accepted else 0)


class Checked(Requests):
    """After every round the cache must hold each request's text but its last token, as a fresh pass writes it."""

    prompts: Sequence[Sequence[int]]
    rounds = widest = 0

    def round(self) -> None:
        super().round()
        Checked.rounds += 1
        Checked.widest = max(self.widest, len(self.under_way))
        for row, request in enumerate(self.under_way):
            text = [*self.prompts[request.number], *request.result.tokens]
            assert (self.lengths[row], self.last[row]) == (len(text), text[-1])
            held = text[:-1]
            fresh = self.target.new_cache(1, len(held))
            self.target.step(Pass.prompt(held, self.target.device), fresh)
            for ours, theirs in zip(self.cache.layers, fresh.layers, strict=True):
                for name in ("keys", "values"):
                    kept, wanted = getattr(ours, name)[row, :, : len(held)], getattr(theirs, name)[0, :, : len(held)]
                    torch.testing.assert_close(kept, wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture
def checked(monkeypatch):
    """From here on, the batches that decode these prompts are checked."""

    def watch(prompts: Sequence[Sequence[int]]) -> type[Checked]:
        for name, value in {"prompts": prompts, "rounds": 0, "widest": 0}.items():
            monkeypatch.setattr(Checked, name, value, raising=False)
        monkeypatch.setattr(loop, "Requests", Checked)
        return Checked

    return watch


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_of_an_untrained_eagle3(target, answers, untrained, shape, batch_size):
    prompts = answers.prompts[:6]
    results = Decoder(target, untrained(target), shape).generate_batch(prompts, NEW_TOKENS, batch_size)
    for result, expected in zip(results, answers.continuations, strict=False):
        assert result.tokens == expected[:NEW_TOKENS]
        check_counts(result, shape)
    accepted, levels = (sum(sum(getattr(result, name)) for result in results) for name in ("accepted", "drafted"))
    assert 0.05 < accepted / levels < 0.9


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_and_wrong_siblings(target, answers, shape, batch_size):
    prompts = answers.prompts[:6]
    oracle = Oracle(answers.prompts, answers.continuations)
    results = Decoder(target, oracle, shape).generate_batch(prompts, NEW_TOKENS, batch_size)
    for result, expected in zip(results, answers.continuations, strict=False):
        assert result.tokens == expected[:NEW_TOKENS]
        check_counts(result, shape)
        if shape is STATIC:
            emitted = 1
            for accepted, nodes in zip(result.accepted, result.nodes, strict=True):
                assert accepted == drafted_prefix(STATIC, emitted)
                assert nodes == STATIC.num_nodes
                emitted += accepted + 1
    assert {0, 2} < {count for result in results for count in result.accepted}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("shape", [*SHAPES, StaticTree.chain(3)], ids=str)
def test_the_cache_holds_the_text_after_every_round(target, answers, checked, shape, batch_size):
    prompts = answers.prompts[:7]
    check = checked(prompts)
    Decoder(target, Oracle(answers.prompts, answers.continuations), shape).generate_batch(prompts, 20, batch_size)
    assert check.rounds > 10
    assert check.widest == batch_size


def test_the_check_of_the_cache_notices_nodes_that_do_not_move(target, answers, checked, monkeypatch):
    monkeypatch.setattr(StaticCache, "move", lambda *_: None)
    prompts = answers.prompts[:7]
    checked(prompts)
    decoder = Decoder(target, Oracle(answers.prompts, answers.continuations), STATIC)
    with pytest.raises(AssertionError):
        decoder.generate_batch(prompts, 20, 1)


@pytest.mark.parametrize("shape", [*SHAPES, 4], ids=str)
def test_requests_that_end_at_different_times_make_room(answers, untrained, shape):
    model = tiny_llama()
    ends = sorted({answers.continuations[index][9 + index] for index in range(4)})
    model.generation_config.eos_token_id = ends
    target = Target.from_model(model)
    prompts = answers.prompts[:12]
    expected = [truncate(answer, NEW_TOKENS, frozenset(ends)) for answer in answers.continuations[:12]]
    assert len({len(answer) for answer in expected}) > 5  # from at once to the limit
    for drafter in (untrained(target), Oracle(answers.prompts, answers.continuations)):
        decoder = Decoder(target, drafter, shape)
        alone = [decoder.generate(prompt, NEW_TOKENS) for prompt in prompts]
        together = decoder.generate_batch(prompts, NEW_TOKENS, 3)
        for one, other, tokens in zip(alone, together, expected, strict=True):
            assert one.tokens == other.tokens == tokens
            # Batched or not, the same drafts are made and accepted.
            assert (one.drafted, one.accepted, one.nodes) == (other.drafted, other.accepted, other.nodes)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_a_request(target, answers, batch_size):
    with pytest.raises(UserError, match=f"batch_size is {batch_size}: expected at least 1"):
        Decoder(target).generate_batch(answers.prompts[:2], 4, batch_size)


def test_requests_are_yielded_as_they_end(answers):
    model = tiny_llama()
    model.generation_config.eos_token_id = answers.continuations[1][0]
    target = Target.from_model(model)
    order = [number for number, _ in Decoder(target).stream(answers.prompts[:6], 12, batch_size=3)]
    assert sorted(order) == list(range(6))
    assert order[0] == 1  # ends with its first token, before any round


CONTEXT = 32


@pytest.fixture(scope="module")
def short() -> Target:
    return Target.from_model(tiny_llama(context=CONTEXT))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drafts_end_where_the_context_ends(short, untrained, checked, shape):
    prompts = random_prompts(12, [20, 24, 26, 27, 28, 29, 30, 31], seed=5)
    answers = transformers_greedy(short.model, prompts, NEW_TOKENS)
    for drafter in (untrained(short), Oracle(prompts, answers)):
        checked(prompts)
        decoder = Decoder(short, drafter, shape)
        for batch_size in (1, 4):
            for prompt, answer, result in zip(
                prompts, answers, decoder.generate_batch(prompts, NEW_TOKENS, batch_size), strict=True
            ):
                room = CONTEXT - len(prompt)
                assert result.tokens == answer[:room]
                check_counts(result, shape)
                # The deepest node of a round stands within the context.
                emitted = 1
                for levels, accepted in zip(result.drafted, result.accepted, strict=True):
                    most = min(shape.depth, room - emitted)
                    assert levels == most if shape is STATIC else levels <= most
                    emitted += accepted + 1


def test_a_tree_contains_the_chain_and_is_never_accepted_less(target, answers, untrained, monkeypatch):
    pairs: list[tuple[DraftTrees, DraftTrees]] = []
    draft = LevelDrafting.draft

    def both(drafting, texts, shape: Shape, *options) -> DraftTrees:
        tree = draft(drafting, texts, shape, *options)
        pairs.append((tree, draft(drafting, texts, StaticTree.chain(shape.depth), *options)))
        return tree

    monkeypatch.setattr(LevelDrafting, "draft", both)
    better = 0
    for prompt, expected in zip(answers.prompts[:8], answers.continuations, strict=False):
        pairs.clear()
        result = Decoder(target, untrained(target), STATIC).generate(prompt, NEW_TOKENS)
        emitted = 1
        for (tree, chain), accepted in zip(pairs, result.accepted, strict=True):
            parents, here, spine = tree.parents[0].tolist(), ROOT, []
            while here in parents:
                here = parents.index(here)
                spine.append(int(tree.tokens[0, here]))
            assert spine == chain.tokens[0].tolist()
            right = 0
            while right < len(spine) and spine[right] == expected[emitted + right]:
                right += 1
            assert accepted >= right
            better += accepted > right
            emitted += accepted + 1
    assert better > 10


@pytest.mark.parametrize("shape", [*SHAPES, StaticTree(STATIC.paths, sampled=False), 3], ids=str)
def test_seeds_decide_whatever_is_decoded_beside(target, answers, untrained, shape):
    decoder = Decoder(target, untrained(target), shape, Sampling(1.0, top_p=0.9))
    prompts, seeds = answers.prompts[:6], [5, 5, 0, 1, 9, 3]
    alone = [decoder.generate(prompt, 20, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    together = decoder.generate_batch(prompts, 20, 4, seeds)
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert [result.accepted for result in together] == [result.accepted for result in alone]
    numbered = decoder.generate_batch(prompts[:2], 20, 2)  # without seeds, a prompt's number is its seed
    assert numbered[1].tokens == decoder.generate(prompts[1], 20, 1).tokens
    assert numbered[1].tokens != alone[1].tokens
