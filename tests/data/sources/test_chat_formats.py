"""Each format in which conversations are kept becomes the same messages."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specdraft.data.sources.base import SPLITS, Conversation
from specdraft.data.sources.chat_formats import CHAT_FORMATS, convert, recognize
from specdraft.data.sources.conversations import Conversations
from specdraft.errors import UserError
from tests.data.written import write


def one(folder: Path, record: dict[str, Any], form: str | None = None) -> Conversation:
    """The conversation of a record, whatever split it falls into."""
    source = Conversations(write(folder / "one.jsonl", [record]), form)
    for split in SPLITS:
        with suppress(UserError):
            return source.conversations(split)[0]
    raise AssertionError("the record is in no split")


USER = {"role": "user", "content": "ask"}


SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"messages": [SYSTEM, USER, {"role": "assistant", "content": "say"}]}, [SYSTEM, USER]),
        ({"conversations": [USER, {"role": "assistant", "content": "say"}]}, [USER]),
        ({"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]}, [USER]),
        (
            {
                "system": "be kind",
                "conversations": [{"from": "user", "value": "ask"}, {"from": "bing", "value": "say"}],
            },
            [SYSTEM, USER],
        ),
        ({"prompt": "ask", "response": "say"}, [USER]),
        ({"question": "ask", "answer": "say", "system": "be kind"}, [SYSTEM, USER]),
        ({"instruction": "ask", "input": "", "output": "say"}, [USER]),
        ({"instruction": "ask", "input": "this", "output": "say"}, [{"role": "user", "content": "ask\n\nthis"}]),
        ({"text": "say"}, []),
    ],
)
def test_forms_are_recognized(tmp_path: Path, record: dict[str, Any], prompt: list[dict[str, str]]) -> None:
    found = one(tmp_path, record)
    assert list(found.prompt_messages) == prompt
    assert found.response == "say"
    assert found.id == f"{tmp_path / 'one.jsonl'}:1"


def test_tool_turns_reasoning_and_text_parts_are_kept(tmp_path: Path) -> None:
    call = [{"type": "function", "function": {"name": "sum", "arguments": {"of": [1, 2]}}}]
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "3", "tool_call_id": "a", "name": "sum"},
        {"role": "assistant", "content": "It is 3.", "reasoning_content": "the tool says so"},
    ]
    found = one(tmp_path, {"messages": turns, "tools": json.dumps(tools)})
    assert found.prompt_messages == (
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": call},
        turns[2],
    )
    assert found.response == "It is 3."
    assert found.messages[-1] == turns[3]
    assert found.tools == tuple(tools)
    observed = {"conversations": [{"from": role, "value": role} for role in ("human", "gpt", "observation", "gpt")]}
    assert [m["role"] for m in one(tmp_path, observed).messages] == ["user", "assistant", "tool", "assistant"]


def test_a_chat_reaches_from_the_first_question_to_the_last_answer(tmp_path: Path) -> None:
    turns = [("gpt", "left over"), ("human", "ask"), ("gpt", "say"), ("human", "more"), ("gpt", "end"), ("human", "?")]
    record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert [m["content"] for m in one(tmp_path, record).messages] == ["ask", "say", "more", "end"]
    open_end = one(tmp_path, {"messages": [SYSTEM, USER]})
    assert (open_end.messages, open_end.response) == ((SYSTEM, USER), None)


def test_the_lines_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    records = [json.loads(line) for line in lines.splitlines()]
    assert [recognize(record) for record in records] == ["messages", "sharegpt", "pair", "text"]
    chats = [convert(record, form) for record, form in zip(records, CHAT_FORMATS, strict=True)]
    assert len({str(chat.messages) for chat in chats[:3]}) == 1 and chats[3].document
