"""Lookahead decoding beside a plain form of it that recomputes everything, and answers that are the target's own."""

from random import Random

import pytest
import torch

from specdraft.decoding.block_verification import block_verification
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Texts
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, ForcedPath, StaticTree
from specdraft.drafters.lookahead import Lookahead, merged
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES

W, N, G = 4, 4, 3


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama())


def best(model, tokens):
    return int(model(torch.tensor([tokens])).logits[0, -1].argmax())


def plainly(model, prompt, rounds, from_text):
    """2402.02057, algorithm 2, without cache, masks and trees. Of every round the window, the guesses, and what is
    emitted."""
    drawn, text = Random(0), [*prompt, best(model, prompt)]
    window = [drawn.choices(prompt, k=W) for _ in range(N - 1)]
    window[0][0] = text[-1]
    pool = []  # n-grams, the oldest first

    def keep(ngram):
        if ngram in pool:
            pool.remove(ngram)
        pool.append(ngram)
        if len(same := [other for other in pool if other[0] == ngram[0]]) > G:
            pool.remove(same[0])

    def keep_text(first):
        for end in range(max(first, N), len(text) + 1) if from_text else ():
            keep(tuple(text[end - N : end]))

    keep_text(N)
    for _ in range(rounds):
        guesses = [ngram[1:] for ngram in reversed(pool) if ngram[0] == text[-1]]
        shown = [list(row) for row in window]
        # The lookahead branch: each column is continued after the part of row 0 before it.
        said = [best(model, text + window[0][1 : j + 1] + [row[j] for row in window[1:]]) for j in range(W)]
        # The verification branch.
        accepted = max((matched(model, text, guess) for guess in guesses), key=len, default=[])
        emitted = [*accepted, best(model, text + accepted)]
        for j in range(W):
            keep(tuple(row[j] for row in [*window, said]))
        text += emitted
        keep_text(len(text) - len(emitted) + 1)
        window = [row[len(accepted) :] for row in [*window[1:], said]]
        window = [row + drawn.choices(prompt, k=W - len(row)) for row in window]
        window[0][0] = text[-1]
        yield shown, guesses, emitted


def matched(model, text, guess):
    """As much of the guess as the target would say."""
    found = []
    for token in guess:
        if token != best(model, text + found):
            break
        found.append(token)
    return found


@pytest.mark.parametrize("from_text", [False, True])
@torch.inference_mode()
def test_windows_guesses_and_tokens_are_those_of_the_plain_form(target, from_text):
    drafter, prompts = Lookahead(W, N, G, pool_from_text=from_text), random_prompts(3, [9, 2, 5])
    batch = Requests(Decoder(target, drafter, 5), 3, 96)
    for number, prompt in enumerate(prompts):
        batch.begin(number, prompt, 80, number)
    references = [plainly(target.model, prompt, 14, from_text) for prompt in prompts]
    nodes = 0
    for expected in zip(*references, strict=True):
        told = [len(request.result.tokens) for request in batch.under_way]
        shown = [([list(row) for row in state.window.rows], state.guesses()) for state in batch.drafting.states]
        batch.round()
        for request, start, (window, guesses), wanted in zip(batch.under_way, told, shown, expected, strict=True):
            assert (window, guesses, request.result.tokens[start:]) == wanted
            # What is counted is what was drafted: guesses that begin alike share nodes, and the window is no draft.
            tree = {guess[:end] for guess in guesses for end in range(1, N)}
            assert request.result.nodes[-1] == len(tree)
            assert request.result.drafted[-1] == max(map(len, tree), default=0)
            assert request.result.accepted[-1] == len(wanted[2]) - 1
            nodes += len(tree) < (N - 1) * len(guesses)
    assert nodes  # some guesses do begin alike
    assert sum(sum(each.result.accepted) for each in batch.under_way) > 10


def test_guesses_that_begin_alike_share_nodes():
    assert merged([(1, 2, 3), (1, 4, 3), (5, 2, 3)], 3) == ([1, 2, 3, 4, 3, 5, 2, 3], [-1, 0, 1, 0, 3, -1, 5, 6])
    assert merged([(1, 2, 3), (1, 4, 3)], 1) == ([1], [-1])
    assert merged([], 3) == ([], [])


@pytest.fixture(scope="module")
def answers(target):
    prompts = random_prompts(4, [1, 2, 9])
    return prompts, transformers_greedy(target.model, prompts, 87)


SHAPES = [2, 5, StaticTree(((0,), (1,), (0, 0))), DynamicTree(3, 2, 6)]
OPTIONS = [{}, {"pool_from_text": False}, {"window": 1, "ngram": 3, "guesses": 1}, {"window": 15, "guesses": 20}]
# The last of them reads more than a cache has room for that reckons with the shape alone.


@pytest.mark.parametrize(("shape", "options"), zip(SHAPES, OPTIONS, strict=True), ids=str)
def test_answers_are_the_targets_own_beside_others_as_alone(target, answers, shape, options):
    prompts, expected = answers
    decoder = Decoder(target, Lookahead(**options), shape)
    together = decoder.generate_batch(prompts, 87, 3)  # to the end of the context
    assert [each.tokens for each in together] == expected
    alone = [decoder.generate(prompt, 87) for prompt in prompts]
    for name in ("drafted", "accepted", "nodes"):
        assert [getattr(each, name) for each in together] == [getattr(each, name) for each in alone]
    assert sum(map(sum, (each.accepted for each in alone))) > 20
    longest = min(decoder.num_draft_tokens, decoder.drafter.ngram - 1)
    assert max(max(each.drafted) for each in alone) == longest


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_answers_of_targets_with_sliding_windows(family):
    target = Target.from_model(FAMILIES[family].build())
    prompts = random_prompts(4, [3, 7, 12], target.vocab_size)
    found = Decoder(target, Lookahead(), 5).generate_batch(prompts, 20, 3)
    assert [each.tokens for each in found] == transformers_greedy(target.model, prompts, 20)


def test_sampled_answers_do_not_depend_on_what_is_decoded_beside(target):
    decoder = Decoder(target, Lookahead(), 5, Sampling(0.7), block_verification)
    prompts = random_prompts(5, [3, 9])
    together = decoder.generate_batch(prompts, 24, 3)
    assert [each.tokens for each in together] == [decoder.generate(prompts[i], 24, i).tokens for i in range(5)]


def test_a_pool_that_is_kept_knows_an_answer_until_it_is_forgotten(target):
    prompt = random_prompts(1, [6])[0]
    for keep in (False, True):
        decoder = Decoder(target, Lookahead(keep_pool=keep), 5)
        first, second = (decoder.generate(prompt, 40) for _ in range(2))
        decoder.drafter.forget()
        third = decoder.generate(prompt, 40)
        assert first.tokens == second.tokens == third.tokens
        assert first.accepted == third.accepted
        assert (len(second.accepted) < len(first.accepted)) == keep


def test_a_tree_cannot_be_measured_and_options_are_checked(target):
    drafter = Lookahead(3, 4, 2, pool_from_text=False, keep_pool=True)
    assert Lookahead(**drafter.config()).config() == drafter.config()
    drafter.bind(target)
    with pytest.raises(UserError, match="learns as it decodes: expected decoding/shape=chain"):
        drafter.drafting(1, 9).draft(Texts(torch.ones(1), 1), ForcedPath(torch.zeros(1, 2), 3), Sampling(), None)
    for options, said in (({"window": 0}, "1 column"), ({"ngram": 2}, "3 tokens"), ({"guesses": 0}, "1 n-gram")):
        with pytest.raises(UserError, match=f"lookahead decoding with .*: expected at least {said}"):
            Lookahead(**options)
