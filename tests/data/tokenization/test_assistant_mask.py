"""Where the assistant speaks, by the chat templates of real models."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from specdraft.data.sources.base import Conversation, Message
from specdraft.data.tokenization.chat import Example, example_from_words, prompt_ids
from specdraft.errors import UserError
from tests.data.tokenization.conftest import ENDS, USER, spoken


def example_from_text(
    tokenizer: PreTrainedTokenizerFast, prompt: Sequence[Message], response: str, **extras: Any
) -> Example:
    conversation = Conversation("FILE:7", "", tuple(prompt), response, extras)
    return example_from_words(tokenizer, conversation, [tokenizer.eos_token_id])


def test_without_marks_the_same_mask_is_found_by_differences(tokenizer: PreTrainedTokenizerFast) -> None:
    unmarked = copy.deepcopy(tokenizer)
    unmarked.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    turns = [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": "    first"}, USER]
    assert example_from_text(unmarked, turns, "  second") == example_from_text(tokenizer, turns, "  second")


@pytest.mark.parametrize("name", ENDS)
def test_real_templates_supervise_every_answer_and_its_end_mark(with_template: Any, name: str) -> None:
    tokenizer, end = with_template(name), ENDS[name]
    turns = [USER, {"role": "assistant", "content": "return left"}, {"role": "user", "content": "return left"}]
    example = example_from_text(tokenizer, turns, "return right")
    blank = " " if name == "mistral" else ""
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    assert spoken(tokenizer, example) == [f"{blank}return left{end}", f"{blank}{thought}return right{end}"]
    rendered = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "return right"}])["input_ids"]
    assert example.input_ids == rendered
    prompt = prompt_ids(tokenizer, turns)
    assert example.input_ids[: len(prompt)] == prompt
    assert example.loss_mask[len(prompt) - 1 : len(prompt) + 1] == [False, True]


@pytest.mark.parametrize("name", [name for name in ENDS if name != "mistral"])
def test_system_turns_are_not_supervised(with_template: Any, name: str) -> None:
    tokenizer = with_template(name)
    example = example_from_text(tokenizer, [{"role": "system", "content": "be kind"}, USER], "return left")
    assert len(spoken(tokenizer, example)) == 1
    assert spoken(tokenizer, example)[0].endswith(f"return left{ENDS[name]}")


def test_prompts_that_the_template_rewrites_leave_no_doubtful_token(with_template: Any) -> None:
    tokenizer = with_template("mistral")  # shows the system turn only before a question that is still open
    turns = [{"role": "system", "content": "be kind"}, USER, {"role": "assistant", "content": "return left"}, USER]
    example = example_from_text(tokenizer, turns, "return right")
    # The template's blank and the first word are one token, across the border of the words.
    assert spoken(tokenizer, example) == [" left</s>", " right</s>"]


def test_reasoning_that_the_template_drops_from_earlier_turns(with_template: Any) -> None:
    tokenizer = with_template("qwen3")
    earlier = [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nreturn left"}, USER]
    example = example_from_text(tokenizer, earlier, "return right", reasoning_content="so be it")
    answers = ["return left<|im_end|>", "<think>\nso be it\n</think>\n\nreturn right<|im_end|>"]
    assert spoken(tokenizer, example) == answers


def test_tool_turns(with_template: Any) -> None:
    tokenizer = with_template("qwen3")
    call = [{"type": "function", "function": {"name": "sum", "arguments": {"of": 1}}}]
    asks = {"role": "assistant", "content": "", "tool_calls": call, "reasoning_content": "count"}
    turns = [USER, asks, {"role": "tool", "content": "3"}]
    called = '<tool_call>\n{"name": "sum", "arguments": {"of": 1}}\n</tool_call><|im_end|>'
    found = spoken(tokenizer, example_from_text(tokenizer, turns, "It is 3.", reasoning_content="clear"))
    assert found == [
        f"<think>\ncount\n</think>\n\n{called}",
        "<think>\nclear\n</think>\n\nIt is 3.<|im_end|>",
    ]
    # A further question takes the reasoning away, also from between the calls: those prompts are rewritten.
    more = [*turns, {"role": "assistant", "content": "It is 3.", "reasoning_content": "clear"}, USER]
    assert spoken(tokenizer, example_from_text(tokenizer, more, "bye"))[:2] == [called, "It is 3.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}", "message 2: no end mark"),
        (
            "{% for m in messages %}{{ m.content + ('<|im_end|>' if m.role == 'user' else '') }}{% endfor %}",
            "message 2: its end mark comes only after",
        ),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", "message 2: its words are not where"),
        ("{{ messages[-1].content }}<|im_end|>", "message 2: the template does not show its words"),
    ],
)
def test_templates_that_cannot_be_masked_name_the_row(with_template: Any, template: str, reason: str) -> None:
    tokenizer = with_template("chatml")
    tokenizer.chat_template = template
    turns = [USER, {"role": "assistant", "content": "return left"}, {"role": "user", "content": "again"}]
    with pytest.raises(UserError, match=f"^FILE:7: .* no safe loss mask, {reason}.*data.regenerate=true"):
        example_from_text(tokenizer, turns, "return right")


def test_a_slow_tokenizer_is_named() -> None:
    class Slow(PreTrainedTokenizer):
        """Words by their place in a list; such tokenizers know no offsets."""

        vocab_size = 400

        def get_vocab(self) -> dict[str, int]:
            return {}

        def _tokenize(self, text: str) -> list[str]:
            return text.split()

        def _convert_token_to_id(self, token: str) -> int:
            return 1

    slow = Slow(eos_token="<end>")
    slow.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    talk = Conversation("a", "c", ({"role": "user", "content": "add"},), "left")
    with pytest.raises(UserError, match=r"tokenizer is a slow one.* or data\.regenerate=true"):
        example_from_words(slow, talk, {0})
