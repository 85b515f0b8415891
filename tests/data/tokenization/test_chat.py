import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from specdraft.data.sources.base import Conversation, Message
from specdraft.data.tokenization.chat import Example, answer_in_words, example_from_words, opening_ids, prompt_ids
from specdraft.errors import UserError

USER = {"role": "user", "content": "def add(left, right):"}
TEMPLATES = Path(__file__).parents[1] / "templates"
ENDS = {  # the end mark of each template's models
    "chatml": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "qwen3": "<|im_end|>",
}
MARKS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>"]
MARKS += ["<|eot_id|>", "[INST]", "[/INST]", "</s>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.fixture(scope="session")
def with_template(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The tokenizer with the marks of all the models, by the name of the template it shall have."""
    marked = copy.deepcopy(tokenizer)
    marked.add_tokens(MARKS, special_tokens=True)

    def choose(name: str) -> PreTrainedTokenizerFast:
        chosen = copy.deepcopy(marked)
        chosen.eos_token = ENDS[name]
        chosen.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        return chosen

    return choose


def example_from_text(
    tokenizer: PreTrainedTokenizerFast, prompt: Sequence[Message], response: str, **extras: Any
) -> Example:
    conversation = Conversation("FILE:7", "", tuple(prompt), response, extras)
    return example_from_words(tokenizer, conversation, [tokenizer.eos_token_id])


def spoken(tokenizer: PreTrainedTokenizerFast, example: Example) -> list[str]:
    """The supervised stretches."""
    found, previous = list[list[int]](), False
    for token, learn in zip(example.input_ids, example.loss_mask, strict=True):
        if learn and not previous:
            found.append([])
        if learn:
            found[-1].append(token)
        previous = learn
    return [tokenizer.decode(ids) for ids in found]


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
