import copy

import pytest
from transformers import PreTrainedTokenizerFast

from specdraft.data.chat import example_from_ids, example_from_text, prompt_ids
from specdraft.errors import UserError

USER = {"role": "user", "content": "def add(left, right):"}


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


def test_generated_ids_stay_the_ids_that_were_generated(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = prompt_ids(tokenizer, [USER])
    text = "return left"
    pieces = [token for letter in text for token in tokenizer(letter)["input_ids"]]
    assert pieces != tokenizer(text)["input_ids"]  # tokenising the decoded text would change them
    example = example_from_ids(prompt, pieces)
    assert example.input_ids == prompt + pieces
    assert example.loss_mask == [False] * len(prompt) + [True] * len(pieces)


def test_a_template_without_marks_is_refused_with_the_way_out(tokenizer: PreTrainedTokenizerFast) -> None:
    unmarked = copy.deepcopy(tokenizer)
    unmarked.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(UserError, match=r"data\.regenerate=true.*\{% generation %\}"):
        example_from_text(unmarked, [USER], "return 1")
    assert prompt_ids(unmarked, [USER]) == prompt_ids(tokenizer, [USER])


def test_no_template_and_a_template_that_refuses(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        prompt_ids(bare, [USER])
    bare.chat_template = "{{ raise_exception('system first') }}"
    with pytest.raises(UserError, match=r"cannot render the roles user \(system first\)"):
        prompt_ids(bare, [USER])
