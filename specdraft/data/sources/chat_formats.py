"""The forms in which people keep conversations, and how a row of each becomes messages.

========= ========================================================================================================
messages  ``{"messages": [{"role", "content", ...}], "tools": [...]}``: OpenAI's; tool calls and reasoning are kept
sharegpt  ``{"conversations": [{"from", "value"}]}``, with a ``system`` text beside them or not
pair      a prompt and its response under one of the usual names, with a ``system`` text or an ``input`` or not
text      ``{"text": "..."}``: a document that nobody asked for
========= ========================================================================================================
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdraft.data.sources.base import Message

# (prompt, response) as the data sets that people train on name them; the first pair that a row has counts.
PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("prompt", "chosen"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("input", "output"),
)
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
# What a message may have beside its role and words, as chat templates read it.
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")


class MalformedError(Exception):
    """Why a row is none of a form."""


class Row(NamedTuple):
    """What a row says: a chat, or a document if ``messages`` is empty."""

    messages: tuple[Message, ...]
    document: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


def recognize(row: Mapping[str, Any]) -> str | None:
    """The form whose keys the row has, None if it is of no form. ``messages`` stands before ``pair`` and ``text``."""
    if isinstance(row.get("messages"), Sequence):
        return "messages"
    if isinstance(row.get("conversations"), Sequence):
        first = next(iter(row["conversations"]), None)
        return "messages" if isinstance(first, Mapping) and "role" in first else "sharegpt"
    if _pair_of(row) is not None:
        return "pair"
    return "text" if "text" in row else None


def convert(row: Mapping[str, Any], form: str) -> Row:
    """The row's chat or document. Raises MalformedError.

    A chat begins with the user (or a system turn): answers before the first question, which shared links leave behind,
    are dropped, and so are questions after the last answer.
    """
    if form == "text":
        return Row((), _text(row, "text"))
    messages = _from_the_first_question(FORMS[form](row))
    return Row(_up_to_the_last_answer(messages), None, _tools(row.get("tools")))


def _openai(row: Mapping[str, Any]) -> list[Message]:
    key = "conversations" if "conversations" in row and "messages" not in row else "messages"
    return [_message(value) for value in _list(row, key)]


def _message(value: Any) -> Message:
    role = value.get("role") if isinstance(value, Mapping) else None
    if role not in _ROLES:
        raise MalformedError(f"a message has the role {role!r}, expected one of {', '.join(_ROLES)}")
    kept = {key: value[key] for key in _KEPT if value.get(key)}
    content = _flat(value.get("content"), may_be_missing="tool_calls" in kept)
    return {"role": role, "content": content, **kept}


def _flat(content: Any, may_be_missing: bool) -> str:
    """The words of a message; OpenAI's lists of text parts are joined."""
    if content is None and may_be_missing:
        return ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise MalformedError("a message's content is no text")
    return _encodable(content)


def _sharegpt(row: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": _encodable(row["system"])})
    for value in _list(row, "conversations"):
        speaker = value.get("from") if isinstance(value, Mapping) else None
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            raise MalformedError(f"a turn is from {speaker!r}, expected one of {', '.join(_SHAREGPT_ROLES)}")
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": _text(value, "value")})
    return messages


def _pair(row: Mapping[str, Any]) -> list[Message]:
    keys = _pair_of(row)
    if keys is None:
        known = "; ".join(" and ".join(pair) for pair in PAIRS)
        raise MalformedError(f"no prompt and response, expected one of the pairs {known}")
    asks, answers = keys
    prompt, context = _text(row, asks), row.get("input")
    if asks != "input" and isinstance(context, str) and context.strip():  # Alpaca: an instruction and its input
        prompt = f"{prompt}\n\n{_encodable(context)}"
    messages: list[Message] = [{"role": "user", "content": prompt}]
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.insert(0, {"role": "system", "content": _encodable(row["system"])})
    return [*messages, {"role": "assistant", "content": _text(row, answers)}]


FORMS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "messages": _openai,
    "sharegpt": _sharegpt,
    "pair": _pair,
}
CHAT_FORMATS = (*FORMS, "text")


def _pair_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if all(isinstance(row.get(key), str) for key in pair)), None)


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row.get(key)
    if not isinstance(value, list) or not value:
        raise MalformedError(f"{key!r} is no list of turns")
    return value


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise MalformedError(f"{key!r} is no text, or an empty one")
    return _encodable(value)


def _encodable(text: str) -> str:
    """JSON can write half a character (a lone surrogate), no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedError("a text holds half a character") from None
    return text


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The declared tools. Some data sets keep them as JSON in a text, because their shapes differ from row to row."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise MalformedError("'tools' is a text, but not JSON") from None
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise MalformedError("'tools' is no list of objects")
    return tuple(value)


def _from_the_first_question(messages: list[Message]) -> list[Message]:
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise MalformedError("nobody asks: there is no turn of the user")
    question = roles.index("user")
    return [m for m in messages[:question] if m["role"] in ("system", "developer")] + messages[question:]


def _up_to_the_last_answer(messages: list[Message]) -> tuple[Message, ...]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return tuple(messages[: answers[-1] + 1] if answers else messages)
