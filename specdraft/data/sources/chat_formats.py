"""The formats in which conversations are kept, and how a record of each becomes messages.

========= ========================================================================================================
messages  ``{"messages": [{"role", "content", ...}], "tools": [...]}``: OpenAI's; tool calls and reasoning are kept
sharegpt  ``{"conversations": [{"from", "value"}]}``, with a ``system`` text beside them or not
pair      a prompt and its response under one of the usual names, with a ``system`` text or an ``input`` or not
text      ``{"text": "..."}``: a document
========= ========================================================================================================"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdraft.data.sources.base import Message

# (prompt, response) as the data sets that people train on name them; the first pair that a record has counts.
PAIRS = (
    *(("prompt", answers) for answers in ("response", "completion", "chosen")),
    *(("instruction", answers) for answers in ("output", "response")),
    *(("question", answers) for answers in ("answer", "response")),
    ("query", "response"),
    ("input", "output"),
)
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
# What a message may have beside its role and words, as chat templates read it.
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")


class MalformedError(Exception):
    """Why a record does not have a format."""


class Chat(NamedTuple):
    """What a record holds: a chat, or a document if ``messages`` is empty."""

    messages: tuple[Message, ...]
    document: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


def recognize(record: Mapping[str, Any]) -> str | None:
    """The format whose keys the record has, None if there is none. ``messages`` goes before ``pair`` and ``text``."""
    if isinstance(record.get("messages"), Sequence):
        return "messages"
    if isinstance(record.get("conversations"), Sequence):
        first = next(iter(record["conversations"]), None)
        return "messages" if isinstance(first, Mapping) and "role" in first else "sharegpt"
    if _pair_of(record) is not None:
        return "pair"
    return "text" if "text" in record else None


def convert(record: Mapping[str, Any], form: str) -> Chat:
    """The record's chat or document. Answers before the first question, as shared links have them, are dropped, and so
    are questions after the last answer. Raises MalformedError."""
    if form == "text":
        return Chat((), text_of(record, "text"))
    messages = FORMS[form](record)
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise MalformedError("there is no turn of the user")
    question, end = roles.index("user"), len(roles)
    if "assistant" in roles[question:]:
        end -= roles[::-1].index("assistant")
    system = [message for message in messages[:question] if message["role"] in ("system", "developer")]
    return Chat((*system, *messages[question:end]), None, _tools(record.get("tools")))


def _openai(record: Mapping[str, Any]) -> list[Message]:
    key = "conversations" if "conversations" in record and "messages" not in record else "messages"
    return [_message(value) for value in list_of(record, key)]


def _message(value: Any) -> Message:
    """A turn as OpenAI has it; lists of text parts are joined."""
    role = value.get("role") if isinstance(value, Mapping) else None
    if role not in _ROLES:
        raise MalformedError(f"a message has the role {role!r}, expected one of {', '.join(_ROLES)}")
    kept = {key: value[key] for key in _KEPT if value.get(key)}
    content = value.get("content")
    if content is None and "tool_calls" in kept:
        content = ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise MalformedError("a message's content is no text")
    return {"role": role, "content": _encodable(content), **kept}


def _sharegpt(record: Mapping[str, Any]) -> list[Message]:
    messages = _system(record)
    for value in list_of(record, "conversations"):
        speaker = value.get("from") if isinstance(value, Mapping) else None
        if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
            raise MalformedError(f"a turn is from {speaker!r}, expected one of {', '.join(_SHAREGPT_ROLES)}")
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": text_of(value, "value")})
    return messages


def _pair(record: Mapping[str, Any]) -> list[Message]:
    keys = _pair_of(record)
    if keys is None:
        known = "; ".join(" and ".join(pair) for pair in PAIRS)
        raise MalformedError(f"no prompt and response, expected one of the pairs {known}")
    asks, answers = keys
    prompt, context = text_of(record, asks), record.get("input")
    if asks != "input" and isinstance(context, str) and context.strip():  # Alpaca: an instruction and its input
        prompt = f"{prompt}\n\n{_encodable(context)}"
    answer = {"role": "assistant", "content": text_of(record, answers)}
    return [*_system(record), {"role": "user", "content": prompt}, answer]


FORMS: dict[str, Callable[[Mapping[str, Any]], list[Message]]]
FORMS = {"messages": _openai, "sharegpt": _sharegpt, "pair": _pair}
CHAT_FORMATS = (*FORMS, "text")


def _system(record: Mapping[str, Any]) -> list[Message]:
    text = record.get("system")
    return [{"role": "system", "content": _encodable(text)}] if isinstance(text, str) and text.strip() else []


def _pair_of(record: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if all(isinstance(record.get(key), str) for key in pair)), None)


def list_of(record: Mapping[str, Any], key: str) -> list[Any]:
    """The turns under a key. Raises MalformedError."""
    value = record.get(key)
    if not isinstance(value, list) or not value:
        raise MalformedError(f"{key!r} is no list of turns")
    return value


def text_of(record: Mapping[str, Any], key: str) -> str:
    """The text under a key, which is not empty. Raises MalformedError."""
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise MalformedError(f"{key!r} is no text, or an empty one")
    return _encodable(value)


def _encodable(text: str) -> str:
    """JSON can hold half a character (a lone surrogate), which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedError("a text holds half a character") from None
    return text


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The declared tools. Some data sets keep them as JSON in a text, as their shapes differ between records."""
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
