"""Benchmark prompts: every accepted form, every kind of bad input."""

import json

import pytest

from specdraft.data.prompts import (
    ALL,
    Prompt,
    at_most_per_category,
    benchmark_questions,
    check_lengths,
    encode,
    load_prompts,
    usual_benchmark,
)
from specdraft.data.sources import stdlib
from specdraft.errors import UserError


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def user(text):
    return {"role": "user", "content": text}


def test_the_three_forms(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, user("a"), {"role": "assistant", "content": "b"}, user("c")]
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "Hello", "category": "greeting", "id": "x7"},
        "",
        {"messages": messages},
        {"question_id": 81, "category": "writing", "turns": ["one", "two", "three"], "reference": []},
    )
    prompt, chat, turns = load_prompts(path)
    assert prompt == Prompt("x7", "greeting", (user("Hello"),), (), f"{path}:1")
    assert chat == Prompt("3", "uncategorized", tuple(messages), (), f"{path}:3")
    assert turns == Prompt("81", "writing", (user("one"),), ("two", "three"), f"{path}:4")
    assert load_prompts(path, limit=2) == [prompt, chat]


def test_line_separators_inside_strings(tmp_path):
    text = "one\u2028two\x85three"
    path = write(tmp_path / "prompts.jsonl", json.dumps({"prompt": text}, ensure_ascii=False))
    assert load_prompts(path)[0].opening == (user(text),)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x"', "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('{"text": "x"}', "has only the keys ['text']"),
        ('{"prompt": "x", "turns": ["y"]}', "has prompt and turns"),
        ('{"prompt": 3}', "'prompt' is no text"),
        ('{"prompt": "  "}', "'prompt' is no text"),
        ('{"turns": []}', "'turns' is no list"),
        ('{"turns": ["a", ""]}', "'turn' is no text, or an empty one"),
        ('{"messages": {"role": "user"}}', "'messages' is no list"),
        ('{"messages": [{"role": "user"}]}', "a message's content is no text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "the last message is the assistant's"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, said):
    path = write(tmp_path / "prompts.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(UserError) as error:
        load_prompts(path)
    assert str(error.value).startswith(f"{path}:2")
    assert said in str(error.value)
    assert "expected" in str(error.value)


def test_files_that_cannot_be_prompts(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="is empty"):
        load_prompts(write(tmp_path / "empty.jsonl", "", "  "))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_prompts(str(tmp_path / "binary.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        load_prompts(str(tmp_path / "folder.jsonl"))
    with pytest.raises(UserError, match="benchmark 'mt-bench' is unknown"):
        load_prompts("mt-bench")
    with pytest.raises(UserError, match="limit is 0"):
        load_prompts("python-stdlib", limit=0)
    with pytest.raises(UserError, match="limit is many"):
        load_prompts("python-stdlib", limit="many")


def test_encode_is_the_chat_template(tokenizer):
    ids = encode(tokenizer, [user("def")])
    assert tokenizer.decode(ids) == "<|begin|><|user|>\ndef<|end|>\n<|assistant|>\n"


def test_encode_without_a_template(tokenizer):
    import copy

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    assert encode(plain, [user("def add")]) == tokenizer("def add")["input_ids"]
    with pytest.raises(UserError, match="no chat template"):
        encode(plain, [user("a"), user("b")])


def test_template_errors_name_the_prompt(tokenizer):
    import copy

    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match=r"p.jsonl:4: .*roles must alternate"):
        check_lengths(strict, [Prompt("a", "c", (user("x"),), (), "p.jsonl:4")], 128, 16)


def test_prompts_longer_than_the_context(tokenizer):
    short = Prompt("a", "c", (user("x"),), (), "p.jsonl:1")
    long = Prompt("b", "c", (user("x y " * 100),), (), "p.jsonl:2")
    longer = Prompt("c", "c", (user("x y " * 200),), (), "p.jsonl:3")
    length = len(encode(tokenizer, long.opening))
    check_lengths(tokenizer, [short], 128, 200)  # the answer may be cut, the prompt fits
    with pytest.raises(UserError, match=rf"2 of 3 prompts .* 128 tokens .* p.jsonl:2 with {length} tokens"):
        check_lengths(tokenizer, [short, long, longer], 128, 16)
    with pytest.raises(UserError, match="no prompts"):
        check_lengths(tokenizer, [], 128, 16)


def test_follow_ups_need_room_for_the_answers(tokenizer):
    conversation = Prompt("a", "c", (user("x"),), ("y", "z"), "p.jsonl:1")
    check_lengths(tokenizer, [conversation], 128, 16)
    with pytest.raises(UserError, match="earlier answers at their longest included"):
        check_lengths(tokenizer, [conversation], 128, 60)


def test_stdlib_prompts_are_held_out_functions():
    prompts = load_prompts("python-stdlib", limit=30)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 30
    assert {prompt.category for prompt in prompts} == {"function", "method"}
    for prompt in prompts:
        assert stdlib.split_of(prompt.id.split(":")[0]) == "test"
        assert prompt.opening[0]["role"] == "user" and "def " in prompt.opening[0]["content"]
    assert load_prompts("python-stdlib", limit=10) == prompts[:10]
    assert len(load_prompts("python-stdlib")) == 40


def test_chat_has_a_prompt_of_each_kind_before_a_second_of_any():
    every = load_prompts("chat", ALL)
    assert len(every) == len({prompt.opening[-1]["content"] for prompt in every}) == 40
    assert load_prompts("chat") == every[:10]
    for first in range(0, 40, 10):
        assert len({prompt.category for prompt in every[first : first + 10]}) == 10
    assert any(prompt.follow_ups for prompt in every[:10])
    assert len(benchmark_questions("chat")) == 43


def test_so_many_prompts_of_each_category():
    prompts = [Prompt(str(n), "ab"[n % 2], ()) for n in range(6)]
    assert [prompt.id for prompt in at_most_per_category(prompts, 2)] == ["0", "1", "2", "3"]
    assert at_most_per_category(prompts, None) == prompts


@pytest.mark.parametrize(
    ("source", "expected"), [("python-stdlib", "python-stdlib"), ("self", "chat"), (None, "python-stdlib")]
)
def test_the_usual_benchmark_is_of_the_kind_that_was_learned(source, expected):
    about = {"extra": {"data": {"source": source}}} if source else {}
    assert usual_benchmark(about) == expected
    assert usual_benchmark({"extra": {}} | about, "some/model") == expected
    assert (usual_benchmark({}, "embedded://tiny"), usual_benchmark({}, "some/model")) == ("python-stdlib", "chat")


def test_conversations_that_end_with_an_answer(tmp_path):
    """As they are logged, and as the doctor writes the worst: asked again without the answers at their end."""
    path = tmp_path / "chats.jsonl"
    asked = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "ç?"},
    ]
    answers = [{"role": "assistant", "content": "d"}, {"role": "assistant", "content": "e"}]
    rows = [{"messages": [*asked, *answers], "category": "chat"}, {"messages": asked}, {"prompt": "f?"}]
    rows += [{"messages": [*asked, answers[0]]}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    found = load_prompts(str(path), logged=True)
    assert [each.answered for each in found] == [True, False, False, True]
    assert [found[i].opening for i in (0, 1, 3)] == [tuple(asked)] * 3
    assert [each.category for each in found] == ["chat", *["uncategorized"] * 3]
    assert [each.origin for each in found] == [f"{path}:{line}" for line in (1, 3, 5, 7)]
    assert load_prompts(str(path), 3, logged=True) == found[:3]
    with pytest.raises(UserError, match="the last message is the assistant's"):
        load_prompts(str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ":2: the last message is the assistant's"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}', ":2: "),
        ("{", ":2 is not JSON"),
        ("[]", ":2 is "),
    ],
)
def test_malformed_traffic_is_refused_by_its_own_name(tmp_path, text, said):
    path = tmp_path / "chats.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{text}\n')
    with pytest.raises(UserError, match=f"^{path}{said}"):
        load_prompts(str(path), logged=True)
    with pytest.raises(UserError, match=r"nothing\.jsonl does not exist"):
        load_prompts(str(tmp_path / "nothing.jsonl"), logged=True)
