"""The decode loop, greedy: transformers' tokens whatever drafts, and exact counts, ends and limits.

What it does when it samples is in ``test_decoder_sampling.py``.
"""

import math
from functools import partial

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.generation import Generation, truncate
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.ngram_cache import NgramCache
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.suffix import Suffix
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from tests.fakes import Replay, TargetAsDraft, random_prompts, tiny_llama, transformers_greedy

V, NEW_TOKENS = 64, 64


def replay(answers, index, error, **options):
    return Replay(answers.continuations[index], error, V, seed=index, **options)


def check_counts(result: Generation, num_draft_tokens: int) -> None:
    """What holds for every generation: its counts explain its tokens, overshoot included."""
    assert len(result.drafted) == len(result.accepted)
    assert all(0 <= a <= d <= num_draft_tokens for a, d in zip(result.accepted, result.drafted, strict=True))
    emitted = (
        1 + len(result.accepted) + sum(result.accepted)
    )  # the prompt's token, and one more than accepted per round
    overshoot = emitted - len(result.tokens)
    assert 0 <= overshoot <= (result.accepted[-1] if result.accepted else 0)
    assert 0 <= result.draft_seconds <= result.decode_seconds
    assert result.prefill_seconds > 0


def check_identity(target, answers, drafter_of, num_draft_tokens, count=24):
    """Every token of ``count`` prompts is transformers' own; returns how many tokens were drafted and accepted."""
    drafted = accepted = 0
    for index, (prompt, continuation) in enumerate(zip(*answers, strict=True)):
        if index == count:
            break
        result = Decoder(target, drafter_of(index), num_draft_tokens).generate(prompt, NEW_TOKENS)
        assert result.tokens == continuation[:NEW_TOKENS], f"prompt {index}"
        check_counts(result, num_draft_tokens)
        drafted += sum(result.drafted)
        accepted += sum(result.accepted)
    assert index >= count - 1
    return drafted, accepted


def test_the_answers_are_varied(answers):
    assert len(answers.prompts) == 24
    assert len({tuple(tokens) for tokens in answers.continuations}) > 18
    assert len({token for tokens in answers.continuations for token in tokens}) > V - 12


def test_plain_decoding(target, answers):
    decoder = Decoder(target)
    for prompt, continuation in zip(*answers, strict=True):
        result = decoder.generate(prompt, NEW_TOKENS)
        assert result.tokens == continuation[:NEW_TOKENS]
        assert result.drafted == result.accepted == []
        assert result.draft_seconds == 0


def test_drafts_that_are_always_accepted(target, answers):
    drafted, accepted = check_identity(target, answers, partial(replay, answers, error=0.0), 5)
    assert accepted == drafted == 24 * 5 * math.ceil((NEW_TOKENS - 1) / 6)


def test_drafts_that_are_never_accepted(target, answers):
    drafted, accepted = check_identity(target, answers, partial(replay, answers, error=1.0), 3)
    assert accepted == 0
    assert drafted == 24 * 3 * (NEW_TOKENS - 1)


def test_drafts_that_are_sometimes_accepted(target, answers):
    drafted, accepted = check_identity(target, answers, partial(replay, answers, error=0.2), 4)
    assert accepted / drafted == pytest.approx(sum(0.8**i for i in range(1, 5)) / 4, abs=0.03)


def test_an_untrained_eagle3(target, answers, untrained):
    head = untrained(target)
    drafted, accepted = check_identity(target, answers, lambda index: head, 2)
    assert 0.1 < accepted / drafted < 0.9


@pytest.mark.parametrize("drafter", [PromptLookup(), Suffix(), NgramCache()], ids=lambda d: type(d).__name__)
def test_drafts_from_the_text_alone(target, answers, drafter):
    drafted, accepted = check_identity(target, answers, lambda index: drafter, 5)
    assert 0.1 < accepted / drafted < 0.9
    prompts = answers.prompts[:24]  # side by side, while requests of other lengths come and go
    together = Decoder(target, drafter, 5).generate_batch(prompts, NEW_TOKENS, 5)
    assert [each.tokens for each in together] == [text[:NEW_TOKENS] for text in answers.continuations[:24]]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 9])
def test_a_draft_by_the_target_itself_gives_k_plus_one(target, answers, num_draft_tokens):
    decoder = Decoder(target, TargetAsDraft(), num_draft_tokens)
    for prompt, continuation in zip(answers.prompts[:6], answers.continuations, strict=False):
        result = decoder.generate(prompt, NEW_TOKENS)
        assert result.tokens == continuation[:NEW_TOKENS]
        rounds = math.ceil((NEW_TOKENS - 1) / (num_draft_tokens + 1))
        assert result.drafted == result.accepted == [num_draft_tokens] * rounds


@pytest.mark.parametrize("layers", [(), (1,)])
def test_drafters_are_told_every_token_with_the_features_before_it(target, answers, layers):
    # Misaligned features would cost acceptance and nothing else: no output would show them.
    for index in range(8):
        prompt = answers.prompts[index]
        drafter = replay(answers, index, error=0.3, layers=layers)
        Decoder(target, drafter, 4).generate(prompt, 40)
        (state,) = drafter.states
        told = torch.cat(state.tokens).tolist()
        assert [*prompt[:1], *told] == [*prompt, *answers.continuations[index]][: 1 + len(told)]
        assert len(state.tokens[0]) == len(prompt)
        seen = Features(*(torch.cat(parts, dim=1) for parts in zip(*state.features, strict=True)))
        before = torch.tensor([prompt[:1] + told[:-1]])
        expected = target.features(before, torch.arange(before.shape[1])[None], layers)
        torch.testing.assert_close(seen.aux, expected.aux, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen.last, expected.last, rtol=1e-4, atol=1e-4)


@pytest.fixture
def ending():
    """Build a target whose texts end at any of the given tokens."""

    def build(ends):
        model = tiny_llama()
        model.generation_config.eos_token_id = ends
        return Target.from_model(model)

    return build


def test_end_of_text_inside_an_accepted_run(ending, answers):
    cuts_inside = 0
    for index in range(20):
        prompt, continuation = answers.prompts[index], answers.continuations[index]
        ends = sorted({continuation[9], continuation[20]})
        target = ending(ends)
        (expected,) = transformers_greedy(target.model, [prompt], NEW_TOKENS)
        expected = truncate(expected, NEW_TOKENS, frozenset(ends))  # transformers pads behind the end of text
        assert expected[-1] in ends
        assert not set(expected[:-1]) & set(ends)
        assert Decoder(target).generate(prompt, NEW_TOKENS).tokens == expected
        result = Decoder(target, replay(answers, index, error=0.0), 5).generate(prompt, NEW_TOKENS)
        assert result.tokens == expected
        check_counts(result, 5)
        # What was accepted behind the end of text counts, and no round follows.
        assert result.accepted == [5] * math.ceil((len(expected) - 1) / 6)
        cuts_inside += (len(expected) - 1) % 6 != 0
    assert cuts_inside > 5


def test_a_first_token_that_ends_the_text_needs_no_round(ending, answers):
    target = ending(answers.continuations[0][0])
    result = Decoder(target, replay(answers, 0, error=0.0), 5).generate(answers.prompts[0], NEW_TOKENS)
    assert result.tokens == answers.continuations[0][:1]
    assert result.drafted == result.accepted == []


def test_the_limit_inside_an_accepted_run(target, answers):
    for limit in range(1, 15):
        result = Decoder(target, replay(answers, 3, error=0.0), 5).generate(answers.prompts[3], limit)
        assert result.tokens == answers.continuations[3][:limit]
        assert result.accepted == [5] * math.ceil((limit - 1) / 6)


CONTEXT = 32


@pytest.fixture(scope="module")
def short() -> Target:
    return Target.from_model(tiny_llama(context=CONTEXT))


@pytest.mark.parametrize("length", [1, 20, *range(24, CONTEXT)])
def test_near_the_end_of_the_context(short, untrained, length):
    prompts = random_prompts(3, [length], seed=5)
    room = CONTEXT - length
    for prompt, answer in zip(prompts, transformers_greedy(short.model, prompts, room + 8), strict=True):
        for drafter in (None, untrained(short), PromptLookup(), TargetAsDraft(), Replay(answer, 0.0, V)):
            result = Decoder(short, drafter, 5).generate(prompt, NEW_TOKENS)
            assert result.tokens == answer[:room]
            if drafter is not None:
                check_counts(result, 5)
                assert room + sum(result.accepted) >= len(result.tokens)
        # Drafts stop at the last position: the last full round ends there.
        assert result.drafted == result.accepted
        assert 1 + len(result.drafted) + sum(result.drafted) <= room + 1
        sampled = Decoder(short, untrained(short), 5, Sampling(1.0)).generate(prompt, NEW_TOKENS)
        assert len(sampled.tokens) == room


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 0])
def test_prompts_that_leave_no_room_or_are_empty(short, length):
    message = f"the prompt has {length} tokens .*: expected .* context of {CONTEXT} tokens"
    for drafter in (None, PromptLookup()):
        with pytest.raises(UserError, match=message):
            Decoder(short, drafter).generate([1] * length, 5)


def test_nothing_to_generate(short):
    with pytest.raises(UserError, match="0 are to be generated"):
        Decoder(short).generate([1], 0)


@pytest.mark.parametrize("num_draft_tokens", [0, -1])
def test_a_drafter_must_draft(target, num_draft_tokens):
    with pytest.raises(UserError, match=f"num_draft_tokens is {num_draft_tokens}: expected at least 1"):
        Decoder(target, PromptLookup(), num_draft_tokens)
    assert Decoder(target, None, num_draft_tokens).generate([1, 2], 3).tokens  # plain decoding has no use for it


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_rounds_that_are_timed_on_the_way_change_nothing(target, answers, temperature):
    shape = StaticTree(((0,), (1,), (0, 0), (1, 0)))
    for index in (3, 7):
        decoder = Decoder(target, PromptLookup(), shape, Sampling(temperature))
        expected = decoder.generate(answers.prompts[index], NEW_TOKENS, seed=5)
        *_, found = decoder.watch(answers.prompts[index], NEW_TOKENS, 5, plain_every=2)
        assert (found.tokens, found.accepted) == (expected.tokens, expected.accepted)
        assert found.plain_rounds == -(-len(found.accepted) // 2) and expected.plain_rounds == 0
        assert found.plain_seconds > 0
