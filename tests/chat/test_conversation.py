"""Answers are those of the decoder, token by token and turn by turn, whatever is looked at while they grow."""

import pytest
import torch

from specdraft.chat.conversation import Conversation
from specdraft.data.prompts import encode
from specdraft.data.tokenization.chat import answer_in_words
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.trace import REJECTED, segments
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.evaluation.search import Search
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.targets import Target
from tests.fakes import tiny_llama


def last(answers):
    return list(answers)[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_segment_is_the_traces(conversation, target, temperature):
    chat = conversation(temperature=temperature)
    seen, rounds = [], 0
    for answer in chat.ask("def add(a, b):"):
        new = answer.segments[len(seen) :]
        seen += new
        rounds += 1
    generation = answer.generation
    assert rounds == 1 + len(generation.accepted)  # the prompt's pass is none
    assert seen == segments(generation.trace, len(generation.tokens), target.tokenizer)
    shown = "".join(each.text for each in seen if each.status != REJECTED)
    assert shown == target.tokenizer.decode(generation.tokens, skip_special_tokens=True).rstrip("\ufffd")
    if temperature == 0:
        assert len({each.status for each in seen}) > 2
        ids = encode(target.tokenizer, [{"role": "user", "content": "def add(a, b):"}])
        assert generation.tokens == Decoder(target).generate(ids, 24).tokens


def test_what_was_said_comes_before_the_next_question(conversation, target):
    chat = conversation(system="be brief")
    first = last(chat.ask("one"))
    said = answer_in_words(target.tokenizer, first.generation.tokens)
    history = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": said},
    ]
    assert chat.messages == history
    second = last(chat.ask("two"))
    ids = encode(target.tokenizer, [*history, {"role": "user", "content": "two"}])
    assert second.generation.trace.prompt == ids
    chat.reset()
    again = last(chat.ask("one"))
    assert again.generation.trace.prompt == first.generation.trace.prompt
    assert chat.answers == [first, second, again]


def test_seeds_differ_between_answers(conversation):
    chat = conversation(temperature=1.0)
    first = last(chat.ask("one"))
    chat.reset()
    assert last(chat.ask("one")).generation.tokens != first.generation.tokens
    assert last(conversation(temperature=1.0).ask("one")).generation.tokens == first.generation.tokens


def test_plain_rounds_are_timed_as_often_as_is_asked(conversation):
    for every in (1, 3):
        generation = last(conversation(plain_every=every).ask("one")).generation
        assert generation.plain_rounds == -(-len(generation.accepted) // every) and generation.plain_seconds > 0
    assert last(conversation(plain_every=0).ask("one")).generation.plain_rounds == 0


def test_the_drafter_may_be_switched_off(conversation):
    chat = conversation()
    drafted = last(chat.ask("one"))
    chat.drafting = False
    chat.reset()
    plain = last(chat.ask("one"))
    assert plain.generation.tokens == drafted.generation.tokens
    assert (drafted.drafted, plain.drafted) == (True, False)
    assert plain.generation.accepted == [] and plain.generation.plain_rounds == 0
    assert {each.status for each in plain.segments} == {"own"}


def test_an_answer_that_was_stopped_is_kept(conversation, target):
    chat = conversation()
    answers = chat.ask("one")
    for answer in answers:
        if len(answer.generation.tokens) > 5:
            break
    answers.close()
    tokens = answer.generation.tokens
    assert 5 < len(tokens) < 24 and chat.answers == [answer]
    assert chat.messages[-1]["content"] == answer_in_words(target.tokenizer, tokens)


def test_a_trained_drafter_samples_its_drafts_above_temperature_0(conversation, target):
    head = Eagle3.for_target(target, torch.arange(0, 300, 2), layers=(1,))
    for temperature, sampled in ((0.0, False), (1.0, True)):
        chat = conversation(head, temperature)
        with chat.ready():
            answer = last(chat.ask("one"))
        assert chat._drafted.shape.sampled is sampled
        assert len(answer.generation.tokens) == 24 and len(answer.generation.drafted) > 0
    assert "eagle3, chain of 3" in chat.description and "temperature 1" in chat.description


def test_what_does_not_fit_is_forgotten(conversation):
    chat = conversation()
    last(chat.ask("one"))
    before = list(chat.messages)
    with pytest.raises(UserError, match=r"the target's context 256: expected room .* with /new"):
        next(chat.ask("word " * 300))
    assert chat.messages == before and len(chat.answers) == 1


def test_without_a_chat_template_every_question_stands_alone(conversation, tokenizer):
    plain = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)
    target = Target.from_model(tiny_llama(300, context=256), plain)
    settings = EvaluationSettings(3, temperatures=(0.0,), max_new_tokens=8)
    chat = Conversation(target, None, settings)
    first, second = last(chat.ask("def")), last(chat.ask("def"))
    assert first.generation.tokens == second.generation.tokens and not first.drafted
    assert first.generation.trace.prompt == plain("def")["input_ids"]
    with pytest.raises(UserError, match="no chat template, which system= needs"):
        Conversation(target, None, settings, system="be brief")


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({"temperatures": (0.0, 1.0)}, {}, "expected one number"),
        ({"num_draft_tokens": "auto"}, {}, "num_draft_tokens is auto"),
        ({"shape": Search(num_nodes=[4])}, {}, "decoding/shape is auto, for which an evaluation measures"),
        ({}, {"plain_every": -1}, "plain_every is -1"),
    ],
)
def test_bad_settings(target, settings, options, said):
    with pytest.raises(UserError, match=said):
        Conversation(target, PromptLookup(), EvaluationSettings(**{"temperatures": (0.0,), **settings}), **options)


def test_a_target_needs_a_tokenizer():
    with pytest.raises(UserError, match="no tokenizer"):
        Conversation(Target.from_model(tiny_llama()), None, EvaluationSettings(temperatures=(0.0,)))
