"""What drafters of the text alone are told and asked, and that the device is waited for once."""

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Texts
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.ngram_cache import NgramCache
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.suffix import Suffix
from specdraft.drafters.text_drafter import TextDrafter, chains
from specdraft.targets import Features, Target
from tests.decoding.counting import CountedSyncs
from tests.fakes import random_prompts, tiny_llama

NO_FEATURES = Features(torch.empty(0), torch.empty(0))


class Noting(TextDrafter):
    """Notes what it is told, and proposes the end of that backwards."""

    def start(self, prompt):
        return [("prompt", prompt)]

    def extend(self, state, tokens):
        state.append(tokens)

    def propose(self, state, length, after=()):
        return [*state[-1], *after][::-1][:length]


def test_requests_are_told_their_prompts_then_what_was_emitted():
    drafting = Noting().drafting(3, 50)
    for row, told in enumerate(([3, 4, 5], [6], [9, 9])):
        drafting.begin(row, row + 1)
        one = torch.ones(1, dtype=torch.int64)
        drafting.advance(Texts(one, 1, row), torch.tensor([told]), one * len(told), NO_FEATURES)
    assert drafting.states == [[("prompt", [1, 3, 4]), [5]], [("prompt", [2]), [6]], [("prompt", [3, 9]), [9]]]
    tokens, counts = torch.tensor([[7, 8, 0], [4, 0, 0], [1, 2, 3]]), torch.tensor([2, 1, 3])
    drafting.advance(Texts(torch.tensor([4, 2, 3]), 4), tokens, counts, NO_FEATURES)
    assert [state[-1] for state in drafting.states] == [[7, 8], [4], [1, 2, 3]]
    texts = Texts(torch.tensor([6, 3, 6]), 6)
    for shape in (StaticTree.chain(2), DynamicTree(2, 3, 9)):
        trees = drafting.draft(texts, shape, Sampling(1.0), None)
        assert trees.tokens.tolist() == [[8, 7], [4, 0], [3, 2]] and trees.q is None and trees.is_chain
        assert trees.alive.tolist() == [[True, True], [True, False], [True, True]]
    drafting.drop(0, 2, 6)
    assert [state and state[-1] for state in drafting.states] == [[1, 2, 3], [4], None]


@pytest.mark.parametrize(
    "drafter", [PromptLookup(), Suffix(max_spec_factor=2), NgramCache()], ids=lambda each: each.family
)
def test_what_may_come_next_is_read_as_if_it_had_come(drafter):
    state = drafter.start([7, 1, 2, 3, 4, 5, 7, 1])
    alone = drafter.propose(state, 3)
    assert alone == [2, 3, 4]
    assert drafter.propose(state, 3, [2, 3]) == [4, 5, 7]
    assert drafter.propose(state, 2, [9, 2, 3]) == [4, 5]
    assert drafter.propose(state, 3, [9]) == []
    assert drafter.propose(state, 3) == alone  # it did not


def test_what_may_come_next_goes_on_where_the_text_ends():
    state = PromptLookup().start([5, 6, 5])
    assert PromptLookup().propose(state, 3, [6, 8, 5, 6]) == [5, 6, 8]


def test_drafts_of_one_length_are_all_alive_and_none_are_none():
    assert chains([[1, 2], [3, 4]], torch.device("cpu")).alive is None
    assert chains([[], []], torch.device("cpu")).tokens.shape == (2, 0)


@torch.inference_mode()
def test_a_round_reads_what_was_emitted_and_writes_the_drafts_once_for_all():
    target = Target.from_model(tiny_llama())
    batch = Requests(Decoder(target, PromptLookup(), 4), 6, 90)
    for number, prompt in enumerate(random_prompts(6, [3, 9, 5, 14])):
        batch.begin(number, prompt, 64, number)
    batch.round()
    with CountedSyncs() as syncs:
        batch.round()
    assert dict(syncs.count) == {"tolist": 2, "tensor": 1}  # one read is the loop's own
