"""Decoding with penalties: what plain decoding with them emits, whatever is drafted and however."""

from dataclasses import replace

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.penalties import Penalties, penalized
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.chance import REJECTED, goodness_of_fit, plain_probabilities
from tests.fakes import TargetAsDraft, random_prompts, tiny_llama

ALL = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
SHAPES = {
    "chain": StaticTree.chain(3),
    "tree": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "dynamic": DynamicTree(3, 3, 8),
    "sure": StaticTree.chain(4, stop=Confidence(0.2)),
}


@pytest.fixture(scope="module")
def peaked() -> Target:
    """One that says a few tokens again and again, unless it is kept from it."""
    return Target.from_model(tiny_llama(vocab_size=40, initializer_range=0.3))


@pytest.fixture(scope="module")
def prompts(peaked) -> list[list[int]]:
    return random_prompts(5, lengths=[2, 5, 9, 14], vocab_size=40)


def by_hand(logits: list[float], sampling: Sampling, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Token by token in Python."""
    found = []
    for token, logit in enumerate(logits):
        if token in prompt or token in answer:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty * (token in answer)
        found.append(logit)
    return torch.tensor(found)


def next_logits(target: Target, sampling: Sampling, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits = target.model(torch.tensor([[*prompt, *answer]])).logits[0, -1]
    return by_hand(logits.tolist(), sampling, prompt, answer)


def plainly(target: Target, sampling: Sampling, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding with the model's own forward."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(next_logits(target, sampling, prompt, tokens).argmax()))
    return tokens


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "all"])
def test_plain_decoding_is_that_of_the_formulas(peaked, prompts, name):
    sampling = ALL if name == "all" else Sampling(**{name: getattr(ALL, name)})
    found = Decoder(peaked, sampling=sampling).generate_batch(prompts, 24, 3)
    assert [each.tokens for each in found] == [plainly(peaked, sampling, prompt, 24) for prompt in prompts]
    free = Decoder(peaked).generate_batch(prompts, 24, 3)
    assert [each.tokens for each in found] != [each.tokens for each in free]


def test_a_repetition_penalty_is_that_of_transformers(peaked, prompts):
    sampling = Sampling(repetition_penalty=1.4)
    for prompt in prompts:
        wanted = peaked.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, repetition_penalty=1.4, eos_token_id=None
        )
        found = Decoder(peaked, PromptLookup(), 3, sampling).generate(prompt, 24).tokens
        assert found == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["head", "lookup", "target"])
def test_greedy_drafting_emits_the_tokens_of_plain_decoding(peaked, prompts, untrained, kind, shape):
    drafter = {"head": untrained(peaked), "lookup": PromptLookup(), "target": TargetAsDraft()}[kind]
    drafted = Decoder(peaked, drafter, SHAPES[shape], ALL).generate_batch(prompts, 40, 3)
    plain = Decoder(peaked, sampling=ALL).generate_batch(prompts, 40, 3)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    if kind == "target":  # drafts that are made without penalties are right now and then
        assert 0 < sum(sum(each.accepted) for each in drafted) < sum(sum(each.drafted) for each in drafted)


def exact_pairs(target: Target, sampling: Sampling, prompt: list[int]) -> torch.Tensor:
    """The joint distribution of the second and third token after a first one of the likeliest."""
    size = target.vocab_size
    pairs = torch.zeros(size, size, dtype=torch.float64)
    first = plain_probabilities(next_logits(target, sampling, prompt, []), sampling)
    for token in first.nonzero()[:, 0].tolist():
        second = plain_probabilities(next_logits(target, sampling, prompt, [token]), sampling)
        for other in second.nonzero()[:, 0].tolist():
            third = plain_probabilities(next_logits(target, sampling, prompt, [token, other]), sampling)
            pairs[other] += first[token] * second[other] * third
    return pairs


@pytest.mark.parametrize("shape", ["chain", "tree", "sure"])
def test_sampled_drafts_are_distributed_as_plain_decoding(peaked, prompts, untrained, shape):
    sampling = replace(ALL, temperature=1.2, top_k=6, top_p=0.95)
    found = Decoder(peaked, untrained(peaked), SHAPES[shape], sampling).generate_batch([prompts[1]] * 1500, 4, 100)
    pairs = torch.tensor([each.tokens[1:3] for each in found]) @ torch.tensor([peaked.vocab_size, 1])
    assert goodness_of_fit(pairs, exact_pairs(peaked, sampling, prompts[1])) > REJECTED


def test_nodes_that_are_judged_by_the_text_alone_are_found_out(peaked, prompts, monkeypatch):
    """What an engine gets wrong that forgets the tokens above a draft."""
    apply = Penalties.apply
    wanted = Decoder(peaked, sampling=ALL).generate_batch(prompts, 40, 3)
    monkeypatch.setattr(Penalties, "apply", lambda self, logits, trees=None, first=0: apply(self, logits, None, first))
    found = Decoder(peaked, TargetAsDraft(), 3, ALL).generate_batch(prompts, 40, 3)
    assert [each.tokens for each in found] != [each.tokens for each in wanted]


def test_every_node_is_judged_by_its_own_path():
    torch.manual_seed(0)
    penalties = Penalties(ALL, 3, 12, torch.device("cpu"))
    penalties.begin(1, torch.tensor([1, 2, 2]))
    penalties.advance(torch.tensor([[2, 3, 3, 9]]), torch.tensor([3]), first=1)
    trees = DraftTrees(torch.tensor([[3, 4, 4, 3, 4]]), torch.tensor([[ROOT, ROOT, 0, 2, 1]]), depth=3, width=2)
    logits = torch.randn(1, 6, 12)
    found = penalties.apply(logits, trees, first=1)
    for place, path in enumerate(([], [3], [4], [3, 4], [3, 4, 3], [4, 4])):
        wanted = by_hand(logits[0, place].tolist(), ALL, [1, 2, 2], [2, 3, 3, *path])
        torch.testing.assert_close(found[0, place], wanted)


def test_a_row_that_is_used_again_knows_nothing_of_the_request_before():
    penalties, logits = Penalties(ALL, 2, 6, torch.device("cpu")), torch.ones(1, 1, 6)
    for row, said in ((0, 1), (1, 2)):
        penalties.begin(row, torch.tensor([0]))
        penalties.advance(torch.tensor([[said]]), torch.tensor([1]), first=row)
    penalties.drop(0, 1)
    torch.testing.assert_close(penalties.apply(logits)[0, 0], by_hand([1.0] * 6, ALL, [0], [2]))
    penalties.begin(1, torch.tensor([5]))
    torch.testing.assert_close(penalties.apply(logits, first=1)[0, 0], by_hand([1.0] * 6, ALL, [5], []))


def test_logits_after_an_answer():
    logits = torch.randn(8)
    wanted = by_hand(logits.tolist(), ALL, [1, 2], [2, 3, 3])
    torch.testing.assert_close(penalized(logits, ALL, [1, 2], [2, 3, 3]), wanted)
    torch.testing.assert_close(penalized(logits, ALL, [1], []), by_hand(logits.tolist(), ALL, [1], []))
    assert penalized(logits, Sampling(), [1], [2]) is logits


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: expected 1"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5: expected 0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3.0: expected 0"),
    ],
)
def test_penalties_that_no_engine_takes(wrong, said):
    with pytest.raises(UserError, match=said):
        Sampling(**wrong)
