"""Rank accuracies: counted against drafts that are known, and through drafters that really draft."""

import pytest
import torch

from specdraft.data.sources.base import Conversation
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.shapes import StaticTree, tree_from_accuracies
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.draft_tree_builder import Vocabulary, grow
from specdraft.drafters.drafting import SingleDrafter
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.evaluation.speedup.rank_accuracy import (
    draft_ranks,
    measured_tree,
    rank_accuracies,
    replayed_acceptance_length,
)
from specdraft.targets import Target
from tests.drafters.alone import Alone
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

V = 64


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama(V))


def answered(target, prompts, length):
    return [(prompt, transformers_greedy(target.model, [prompt], length)[0]) for prompt in prompts]


def accuracies_of(drafter, target, answers, depth, top):
    return rank_accuracies(draft_ranks(drafter, target, answers, depth, top), depth, top)


class Ranked(SingleDrafter):
    """Knows the answer and hides it: at level d behind e emitted tokens it is of rank ``rank(e, d)``."""

    def __init__(self, answer, rank):
        super().__init__()
        self.answer, self.rank = [*answer, *[0] * 8], rank  # drafts may look past the end

    def start(self, first_token, max_length):
        return {"emitted": 0, "text": [first_token]}

    def advance(self, state, tokens, features):
        assert features.last.shape[1] == len(tokens)
        state["emitted"] += len(tokens) if state["emitted"] else 1
        state["text"] += tokens.tolist()

    def draft(self, state, shape, sampling, chance):
        emitted = state["emitted"]

        def logits(depth, nodes):
            order = torch.arange(V).roll(depth)  # any order, in which the true token gets its rank
            true = self.answer[emitted + depth]
            order = order[order != true]
            rank = self.rank(emitted, depth)
            order = torch.cat([order[:rank], torch.tensor([true]), order[rank:]])
            values = torch.empty(V)
            values[order] = torch.arange(V, 0, -1.0)
            return values.expand(1, nodes, -1)

        def extend(level):
            return logits(level.depth, level.tokens.shape[1])

        return grow(logits(0, 1)[:, 0], extend, shape, sampling, chance, Vocabulary(V))


def test_ranks_are_counted_where_the_levels_above_were_right(target):
    prompt = random_prompts(1, [7])[0]
    answer = transformers_greedy(target.model, [prompt], 40)[0]

    table = torch.randint(5, (48, 3), generator=torch.Generator().manual_seed(0))  # a rank of 4 is out of reach

    def rank(emitted, depth):
        return int(table[emitted, depth])

    counted = accuracies_of(Ranked(answer, rank), target, [(prompt, answer)], depth=3, top=4)
    hits, tried = torch.zeros(3, 4), torch.zeros(3, 1)
    for emitted in range(1, 40):
        for depth in range(min(3, 40 - emitted)):
            tried[depth] += 1
            found = rank(emitted, depth)
            if found >= 4:
                break
            hits[depth, found] += 1
    assert (hits > 0).all() and (hits.sum(-1) < tried[:, 0]).all()
    torch.testing.assert_close(torch.tensor(counted), hits / tried)


@pytest.mark.parametrize(
    "build",
    [
        lambda target: Eagle3.for_target(target, layers=(1,)),
        lambda target: Medusa.for_target(target, num_heads=2),
        lambda target: DraftModel.for_target(target, copy_layers=1),
        lambda target: PromptLookup(),
    ],
    ids=["eagle3", "medusa", "draft_model", "prompt_lookup"],
)
def test_answers_asked_side_by_side_are_ranked_as_alone(build, target):
    """Ten answers of four lengths: more than are asked at once, and some end before others."""
    torch.manual_seed(0)
    drafter = build(target)
    answers = [
        (prompt, transformers_greedy(target.model, [prompt], (12, 2, 7, 1)[n % 4])[0])
        for n, prompt in enumerate(random_prompts(10, [5, 8, 1]))
    ]
    together = draft_ranks(drafter, target, answers, 3, 16)
    assert together == [draft_ranks(drafter, target, [each], 3, 16)[0] for each in answers]
    assert [len(rows) for rows in together] == [len(answer) - 1 for _, answer in answers]
    found = [rank for rows in together for row in rows for rank in row]
    assert None in found and (isinstance(drafter, PromptLookup) or len(set(found)) > 4)


def test_levels_that_are_never_right_are_left_out(target):
    prompt = random_prompts(1, [7])[0]
    answer = transformers_greedy(target.model, [prompt], 10)[0]
    answers = [(prompt, answer)]
    assert accuracies_of(Ranked(answer, lambda e, d: 0 if d < 2 else 9), target, answers, 5, 3) == [[1, 0, 0]] * 2
    assert accuracies_of(Ranked(answer, lambda e, d: 9), target, answers, 5, 3) == [[0, 0, 0]]


@pytest.mark.parametrize("kind", [Medusa, Hydra])
def test_no_level_below_the_last_head(kind, target):
    torch.manual_seed(0)
    drafter = kind.for_target(target, num_heads=2)
    accuracies = accuracies_of(drafter, target, answered(target, random_prompts(3, [5, 8]), 12), depth=4, top=V)
    assert len(accuracies) == 2
    for level in accuracies:
        assert sum(level) == pytest.approx(1.0), "with every rank kept, one of them is right"


def test_a_drafter_of_chains_alone_can_be_asked(target):
    accuracies = accuracies_of(PromptLookup(), target, answered(target, [[1, 2, 3, 1, 2, 3]], 24), depth=2, top=3)
    assert all(sum(level[1:]) == 0 and 0 <= level[0] <= 1 for level in accuracies)


def test_the_tree_of_the_accuracies_accepts_what_they_promise(target):
    """Replayed from every position, the mean number of accepted tokens is the sum of the nodes' joint probabilities."""
    torch.manual_seed(1)
    drafter = Medusa.for_target(target, num_heads=3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    prompts = random_prompts(4, [6])
    accuracies = accuracies_of(drafter, target, answered(target, prompts, 20), depth=1, top=8)
    tree = tree_from_accuracies(accuracies, 5)
    assert isinstance(tree, StaticTree) and tree.num_nodes == 5
    promised = sum(accuracies[0][path[0]] for path in tree.paths)
    accepted = rounds = 0
    for prompt in prompts:
        answer = transformers_greedy(target.model, [prompt], 20)[0]
        features = target.features(torch.tensor([prompt + answer]), torch.arange(26)[None], ())
        for emitted in range(1, 20):
            state = Alone(drafter, prompt[0])
            before = type(features)(*(part[:, : 6 + emitted - 1] for part in features))
            state.advance(torch.tensor((prompt + answer)[1 : 6 + emitted]), before)
            accepted += answer[emitted] in state.draft(tree).tokens[0].tolist()
            rounds += 1
    assert accepted / rounds == pytest.approx(promised) and promised > 0


def test_answers_without_a_token_to_draft_are_refused(target):
    with pytest.raises(UserError, match="expected answers to draft"):
        accuracies_of(PromptLookup(), target, answered(target, [[1, 2, 3]], 1), depth=2, top=3)


def test_a_tree_is_measured_on_validation_prompts_that_fit(tokenizer, monkeypatch):
    """The second prompt is longer than the context."""
    asked = []

    def prompts(self, split, limit):
        asked.append((split, limit))
        texts = ("def add(a, b):", "def add(a, b):\n" * 90)
        return [Conversation(text, "function", ({"role": "user", "content": text},)) for text in texts[:limit]]

    monkeypatch.setattr(PythonStdlib, "prompts", prompts)
    target = Target.from_model(tiny_llama(len(tokenizer)), tokenizer)
    torch.manual_seed(0)
    drafter = Medusa.for_target(target, num_heads=3)
    tree = measured_tree(drafter, target, 6, depth=3, top_k=4, limit=2, max_new_tokens=12)
    assert asked == [("validation", 2)]
    assert tree.num_nodes == 6 and tree.depth <= 3
    assert max(rank for path in tree.paths for rank in path) < 4


@pytest.mark.parametrize("tree", [StaticTree.chain(1), StaticTree.chain(3), StaticTree(((0,), (1,), (0, 0), (1, 0)))])
def test_replayed_rounds_are_those_of_decoding(target, tree):
    torch.manual_seed(1)
    drafter = Medusa.for_target(target, num_heads=3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    prompts = random_prompts(6, [6, 9])
    decoded = [Decoder(target, drafter, tree, trace=True).generate(prompt, 40) for prompt in prompts]
    answers = [(prompt, result.tokens) for prompt, result in zip(prompts, decoded, strict=True)]
    replayed = replayed_acceptance_length(draft_ranks(drafter, target, answers, 3, 2), tree)
    whole = [len(result.accepted) - (len(result.trace.tokens) > 40) for result in decoded]  # the last may run over
    accepted = sum(sum(result.accepted[:rounds]) for result, rounds in zip(decoded, whole, strict=True))
    assert replayed == pytest.approx(1 + accepted / sum(whole), abs=0.03) and replayed > 1


def test_rounds_that_an_answer_cuts_short_are_not_replayed():
    assert replayed_acceptance_length([[[0, 0], [None], [0]]], StaticTree.chain(2)) == 1 + 2 / 1
    assert replayed_acceptance_length([[[0, 0], [None], [None], [1]]], StaticTree.chain(2)) == 1 + 2 / 2
