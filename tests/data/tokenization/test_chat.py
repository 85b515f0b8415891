import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specdraft.data.sources.base import Conversation, Message
from specdraft.data.tokenization.chat import (
    Example,
    answer_in_words,
    example_from_words,
    opening_ids,
    prompt_ids,
    question_ids,
)
from specdraft.errors import UserError
from tests.data.tokenization.conftest import USER


def example_from_text(
    tokenizer: PreTrainedTokenizerFast, prompt: Sequence[Message], response: str, **extras: Any
) -> Example:
    conversation = Conversation("FILE:7", "", tuple(prompt), response, extras)
    return example_from_words(tokenizer, conversation, [tokenizer.eos_token_id])


def test_the_loss_mask_covers_the_answer_and_its_end_mark(tokenizer: PreTrainedTokenizerFast) -> None:
    example = example_from_text(tokenizer, [USER], "    return left + right")
    supervised = [token for token, learn in zip(example.input_ids, example.loss_mask, strict=True) if learn]
    assert tokenizer.decode(supervised) == "    return left + right" + tokenizer.eos_token
    assert supervised[-1] == tokenizer.eos_token_id


def test_a_text_example_begins_with_its_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = prompt_ids(tokenizer, [USER])
    example = example_from_text(tokenizer, [USER], "return 1")
    assert example.input_ids[: len(prompt)] == prompt
    assert example.loss_mask.index(True) == len(prompt)


def test_earlier_answers_are_supervised_as_well(tokenizer: PreTrainedTokenizerFast) -> None:
    earlier = [USER, {"role": "assistant", "content": "first"}, {"role": "user", "content": "again"}]
    example = example_from_text(tokenizer, earlier, "second")
    supervised = [token for token, learn in zip(example.input_ids, example.loss_mask, strict=True) if learn]
    assert tokenizer.decode(supervised) == f"first{tokenizer.eos_token}second{tokenizer.eos_token}"


def test_an_answer_that_was_cut_teaches_no_end(tokenizer: PreTrainedTokenizerFast) -> None:
    earlier = (USER, {"role": "assistant", "content": "first"}, {"role": "user", "content": "again"})
    whole = Conversation("FILE:7", "", earlier, "second, of")
    ends = [tokenizer.eos_token_id]
    ids, mask = example_from_words(tokenizer, replace(whole, cut=True), ends)
    expected, expected_mask = example_from_words(tokenizer, whole, ends)
    assert (ids, mask) == (expected[: len(ids)], expected_mask[: len(ids)])
    assert tokenizer.decode([token for token, learn in zip(ids, mask, strict=True) if learn]).endswith("second, of")
    assert ids.count(tokenizer.eos_token_id) == expected.count(tokenizer.eos_token_id) - 1


def test_documents_are_supervised_whole_and_continued_from_their_beginning(tokenizer: PreTrainedTokenizerFast) -> None:
    document = Conversation("FILE:7", "", (), "return left + right\n" * 3)
    example = example_from_words(tokenizer, document, [])
    assert example.input_ids[0] == tokenizer.bos_token_id
    assert example.loss_mask == [False] + [True] * (len(example.input_ids) - 1)
    assert tokenizer.decode(example.input_ids[1:]) == (document.response or "") + tokenizer.eos_token
    opening = opening_ids(tokenizer, document)
    assert opening == example.input_ids[: (len(example.input_ids) - 1) // 2]


def test_no_answer_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"FILE:7 has no response: set data\.regenerate=true"):
        example_from_words(tokenizer, Conversation("FILE:7", "", (USER,)), [])


def test_no_template_and_a_template_that_refuses(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        prompt_ids(bare, [USER])
    bare.chat_template = "{{ raise_exception('system first') }}"
    with pytest.raises(UserError, match=r"cannot render the roles user \(system first\)"):
        prompt_ids(bare, [USER])


CHANNELS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>final<|message|>left<|return|>", "left"),
        ("<|channel|>final <|constrain|>json<|message|>left<|return|>", "left"),
        ("<|channel|>analysis<|message|>add left", ""),  # cut while it was thinking
        ("<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>final", ""),
        ("add left<|return|>", "add left"),
    ],
)
def test_an_answer_in_channels_is_its_final_one(tokenizer: PreTrainedTokenizerFast, answer: str, words: str) -> None:
    """As servers of gpt-oss hand it out, and as its template shows earlier answers."""
    harmony = copy.deepcopy(tokenizer)
    harmony.add_tokens(CHANNELS, special_tokens=True)
    ids = harmony(answer, add_special_tokens=False)["input_ids"]
    assert answer_in_words(harmony, ids) == words
    assert answer_in_words(tokenizer, tokenizer("add left", add_special_tokens=False)["input_ids"]) == "add left"


def test_a_users_turn_begins_where_the_template_puts_its_words(tokenizer: PreTrainedTokenizerFast) -> None:
    earlier = [USER, {"role": "assistant", "content": "first"}]
    for said in ([], earlier):
        begin, end = question_ids(tokenizer, said)
        words = tokenizer("left + right", add_special_tokens=False)["input_ids"]
        whole = prompt_ids(tokenizer, [*said, {"role": "user", "content": "left + right"}])
        assert whole[: len(begin) + len(words) + 1] == [*begin, *words, end]


def test_a_template_that_does_not_show_the_users_words_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(UserError, match="does not mark where a user's turn ends"):
        question_ids(silent, [])
