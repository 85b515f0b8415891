"""Several turns: each prompt holds the target's words so far, and what extends it exactly is one example."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specdraft.data.regeneration.dialogue import Dialogue, Outcome, answered_messages
from specdraft.data.regeneration.request import RegenerationSettings
from specdraft.data.sources.base import Conversation
from specdraft.data.sources.self_written import SelfWritten
from specdraft.data.tokenization.chat import opening_ids, prompt_ids, question_ids
from specdraft.targets import Target

TEMPLATES = Path(__file__).parents[1] / "templates"
SETTINGS = RegenerationSettings(temperatures=(0.0, 1.0), max_new_tokens=20)
ASK, ASK_AGAIN = {"role": "user", "content": "add left"}, {"role": "user", "content": "add right"}
THEIRS = {"role": "assistant", "content": "what people wrote"}


def encode(target: Target, words: str, ended: bool = True) -> list[int]:
    ids = target.tokenizer(words, add_special_tokens=False)["input_ids"]
    return [*ids, target.tokenizer.eos_token_id] if ended else ids


def played(
    target: Target, conversation: Conversation, answers: list[list[int]], room: int = 256
) -> tuple[Any, Outcome]:
    dialogue = Dialogue(target, conversation, 0, SETTINGS, room)
    requests = []
    while (request := dialogue.request()) is not None:
        requests.append(request)
        dialogue.take(answers[len(requests) - 1])
    return requests, dialogue.outcome


def test_the_next_prompt_holds_the_targets_words(target: Target) -> None:
    system = {"role": "system", "content": "be brief"}
    conversation = Conversation("a", "c", (system, ASK, THEIRS, ASK_AGAIN), "more of people")
    answers = [encode(target, "one two"), encode(target, "three")]
    requests, outcome = played(target, conversation, answers)
    ours = [{"role": "assistant", "content": "one two"}, {"role": "assistant", "content": "three"}]
    assert requests[0].prompt == prompt_ids(target.tokenizer, [system, ASK])
    assert requests[1].prompt == prompt_ids(target.tokenizer, [system, ASK, ours[0], ASK_AGAIN])
    assert list(requests[1].messages) == [system, ASK, ours[0], ASK_AGAIN]
    assert requests[0].seed != requests[1].seed
    assert answered_messages(conversation, outcome, target) == [system, ASK, ours[0], ASK_AGAIN, ours[1]]


def test_a_prompt_that_extends_the_text_so_far_is_one_example(target: Target) -> None:
    conversation = Conversation("a", "c", (ASK, THEIRS, ASK_AGAIN), None)
    answers = [encode(target, "one two"), encode(target, "three")]
    requests, outcome = played(target, conversation, answers)
    (example,) = outcome.as_examples()
    assert example.input_ids == [*requests[1].prompt, *answers[1]]
    assert outcome.answers == answers
    supervised = [token for token, learned in zip(example.input_ids, example.loss_mask, strict=True) if learned]
    assert supervised == answers[0] + answers[1]


def test_ids_that_words_would_change_stay_as_they_were_sampled(target: Target) -> None:
    sampled = [i for letter in "return left" for i in encode(target, letter, ended=False)]
    assert sampled != encode(target, "return left", ended=False)
    sampled += sorted(target.eos_token_ids)
    conversation = Conversation("a", "c", (ASK, THEIRS, ASK_AGAIN), None)
    requests, outcome = played(target, conversation, [sampled, encode(target, "three")])
    first, second = outcome.as_examples()
    assert first.input_ids == requests[0].prompt + sampled
    assert first.loss_mask == [False] * len(requests[0].prompt) + [True] * len(sampled)
    assert sum(second.loss_mask) == len(encode(target, "three"))
    assert not outcome.unfinished


def test_an_answer_that_was_cut_ends_its_conversation_and_is_learned_without_an_end_mark(target: Target) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "42"}
    later = (ASK_AGAIN, THEIRS, ASK, call, result, THEIRS, ASK_AGAIN)
    conversation = Conversation("a", "c", (ASK, THEIRS, *later), "more of people")
    whole, cut = encode(target, "one"), encode(target, "left right", ended=False)
    requests, outcome = played(target, conversation, [cut])
    assert len(requests) == 1
    (example,) = outcome.as_examples()
    assert example.input_ids == [*requests[0].prompt, *cut]
    assert example.loss_mask == [False] * len(requests[0].prompt) + [True] * len(cut)
    assert outcome.unfinished and outcome.dropped == 3 and not outcome.shortened  # a call of a tool is not asked for
    assert answered_messages(conversation, outcome, target) == [ASK, {"role": "assistant", "content": "left right"}]
    requests, outcome = played(target, conversation, [whole, cut])
    assert len(requests) == 2 and outcome.answers == [whole, cut] and outcome.dropped == 2
    requests, outcome = played(target, conversation, [whole] * 3 + [cut])
    assert len(requests) == 4 and outcome.unfinished and outcome.dropped == 0  # the last turn of all
    assert not played(target, conversation, [whole] * 4)[1].unfinished


def test_reasoning_that_the_template_drops_is_no_context_of_the_next_turn(target: Target) -> None:
    thinking = copy.copy(target)
    thinking.tokenizer = copy.deepcopy(target.tokenizer)
    thinking.tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    conversation = Conversation("a", "c", (ASK, THEIRS, ASK_AGAIN), None)
    answers = [encode(target, "<think>\nadd it up\n</think>\n\nthe sum"), encode(target, "three")]
    requests, outcome = played(thinking, conversation, answers)
    context = thinking.tokenizer.decode(requests[1].prompt)
    assert "the sum" in context and "add it up" not in context
    assert len(outcome.examples) == 2 and outcome.answers == answers


def test_tool_calls_and_their_results_are_context(target: Target) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "42"}
    conversation = Conversation("a", "c", (ASK, call, result, THEIRS, ASK_AGAIN), "more")
    dialogue = Dialogue(target, conversation, 0, SETTINGS, 256)
    # The template of the tests' tokenizer need not know tools for this.
    target.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    first = dialogue.request()
    assert first is not None and list(first.messages) == [ASK, call, result]
    dialogue.take(encode(target, "one"))
    second = dialogue.request()
    assert second is not None and [m["role"] for m in second.messages][-2:] == ["assistant", "user"]
    dialogue.take(encode(target, "two"))
    said = answered_messages(conversation, dialogue.outcome, target)
    assert [m["content"] for m in said] == ["add left", "", "42", "one", "add right", "two"]


def test_a_turn_without_room_ends_the_conversation(target: Target) -> None:
    conversation = Conversation("a", "c", (ASK, THEIRS, ASK_AGAIN), "more of people")
    answers = [encode(target, "one two"), encode(target, "three")]
    second = len(played(target, conversation, answers)[0][1].prompt)
    requests, outcome = played(target, conversation, answers, room=second + 19)
    assert len(requests) == 1 and outcome.shortened and outcome.answers == answers[:1]
    assert not played(target, conversation, answers, room=second + 20)[1].shortened
    requests, outcome = played(target, conversation, answers, room=20)
    assert not requests and not outcome.examples and not outcome.shortened
    assert played(target, conversation, [answers[0], []])[1].shortened  # an answer that has no words


def test_temperatures_take_turns_and_documents_are_continued(target: Target) -> None:
    document = Conversation("a", "c", (), "def add(left, right): return left + right")
    request = Dialogue(target, document, 3, SETTINGS, 256).request()
    assert request is not None and request.sampling.temperature == 1.0 and not request.messages
    assert request.prompt == opening_ids(target.tokenizer, document)
    _, outcome = played(target, document, [encode(target, "one")])
    assert answered_messages(document, outcome, target) == [{"role": "assistant", "content": "one"}]


def test_outcomes_are_json(target: Target) -> None:
    _, outcome = played(target, Conversation("a", "c", (ASK,), None), [encode(target, "one")])
    assert Outcome(**json.loads(json.dumps(asdict(outcome)))).answers == outcome.answers


@pytest.fixture(autouse=True)
def own_tokenizer(target: Target) -> None:
    """The session's tokenizer stays as it is."""
    target.tokenizer = copy.deepcopy(target.tokenizer)


def own(turns: int = 1, **settings: Any) -> Conversation:
    return SelfWritten(turns=turns, max_question_tokens=30, **settings).conversations("train", 1)[0]


def test_the_target_writes_the_question_and_answers_it_as_a_users(target: Target) -> None:
    conversation, tokenizer = own(2, topics=("be brief",), temperature=0.7), target.tokenizer
    (begin, end), system = question_ids(tokenizer, []), {"role": "system", "content": "be brief"}
    assert end in target.eos_token_ids or end == begin[-1] or end < 6  # a mark of the template's
    steered, _ = question_ids(tokenizer, [system])
    answers = [
        [*encode(target, " what is left? ", ended=False), end, 9, 9],  # an engine may stop later than the turn
        encode(target, "it is right"),
        encode(target, "and what is right?"),
        encode(target, "it is left"),
    ]
    requests, outcome = played(target, conversation, answers)
    asked = [{"role": "user", "content": "what is left?"}, {"role": "user", "content": "and what is right?"}]
    said = {"role": "assistant", "content": "it is right"}
    assert requests[0].prompt == steered != begin
    assert requests[1].prompt == prompt_ids(tokenizer, asked[:1])  # without the topic
    assert requests[2].prompt == question_ids(tokenizer, [system, asked[0], said])[0]
    assert requests[3].prompt == prompt_ids(tokenizer, [asked[0], said, asked[1]])
    assert [request.sampling.temperature for request in requests] == [0.7, 0.0, 0.7, 0.0]
    assert [request.max_new_tokens for request in requests] == [30, 20, 30, 20]
    assert not requests[0].messages and list(requests[1].messages) == asked[:1]
    assert len({request.seed for request in requests}) == 4
    assert outcome.questions == ["what is left?", "and what is right?"]
    assert outcome.answers == [answers[1], answers[3]]  # questions are not learned
    written = answered_messages(conversation, outcome, target)
    assert written == [asked[0], said, asked[1], {"role": "assistant", "content": "it is left"}]


@pytest.mark.parametrize(
    ("question", "ended", "why"),
    [("what is left", False, "cut"), ("left", True, "fewer than two words"), ("What, is LEFT?", True, "asked before")],
)
def test_a_question_that_is_not_worth_asking_ends_the_conversation(
    target: Target, question: str, ended: bool, why: str
) -> None:
    dialogue = Dialogue(target, own(2), 0, SETTINGS, 256, {"what is left"})
    dialogue.request()
    dialogue.take(encode(target, question, ended))
    assert dialogue.request() is None
    assert dialogue.outcome.rejected == why
    assert not dialogue.outcome.examples and not dialogue.outcome.refused


def test_questions_asked_are_noted_for_the_next_conversation(target: Target) -> None:
    noted: set[str] = set()
    dialogue = Dialogue(target, own(), 0, SETTINGS, 256, noted)
    dialogue.request()
    dialogue.take(encode(target, "What is left?"))
    assert noted == {"what is left"}
