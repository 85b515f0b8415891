"""One request, answered piece by piece, and when each piece came.

The engine applies its own chat template, as it does for anybody. Every request is sent once: one that failed would
otherwise be counted twice, or its second attempt be taken for a short answer."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from specdraft.data.sources.base import Message
from specdraft.decoding.served import SERVED
from specdraft.errors import UserError

_SHOWN = 300  # characters of a server's message
_LATER = {408, 409, 425, 429}  # statuses that may pass, and every 5xx


@dataclass(frozen=True)
class Question:
    """What is asked: a conversation up to an answer. number: of the prompt; turn: 0 for the opening."""

    number: int
    turn: int
    category: str
    messages: tuple[Message, ...]


@dataclass
class Answer:
    """What came back. sent: seconds on a clock that all answers of a process share; arrivals: when each piece of text
    came; tokens: how many there are; ids: which, where the server says so. error: why it is not whole, else None."""

    question: Question
    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    error: str | None = None

    @property
    def seconds(self) -> float:
        """From sending to the last piece."""
        return self.arrivals[-1] - self.sent

    @property
    def first_token_seconds(self) -> float:
        """From sending to the first piece."""
        return self.arrivals[0] - self.sent

    @property
    def token_seconds(self) -> float | None:
        """Seconds for each token after the first; None of an answer of one."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces, as a reader sees them; a piece holds all tokens that a round accepted."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def said(self) -> list[int] | str:
        """What is compared with other answers: token ids, or text where there are none."""
        return self.ids or self.text


@dataclass(frozen=True)
class Asking:
    """How questions are asked. temperature "served": requests do not say how to sample, and the server does by its own
    defaults. timeout: seconds for a whole answer; stall: seconds without a piece of it. extra: more
    fields of every request."""

    max_new_tokens: int
    temperature: float | str = 0.0
    seed: int = 0
    timeout: float = 600.0
    stall: float = 120.0
    chat: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hot = self.temperature == SERVED or (isinstance(self.temperature, int | float) and self.temperature >= 0)
        if self.max_new_tokens < 1 or self.timeout <= 0 or self.stall <= 0 or not hot:
            given = f"max_new_tokens={self.max_new_tokens}, timeout={self.timeout}, stall={self.stall}"
            wanted = f"expected positive numbers, or temperature=0 or {SERVED}"
            raise UserError(f"{given} and temperature={self.temperature}: {wanted}")

    def with_options(self, options: Mapping[str, Any]) -> "Asking":
        """The same with options of the chat template; those that ``extra`` has already stay as they are."""
        if not options or not self.chat:
            return self
        kwargs = {**options, **(self.extra.get("chat_template_kwargs") or {})}
        return replace(self, extra={**self.extra, "chat_template_kwargs": kwargs})

    def payload(self, model: str, question: Question) -> dict[str, Any]:
        """The request's body. Raises UserError for a conversation where the server takes plain text."""
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_new_tokens}
        body |= {} if self.temperature == SERVED else {"temperature": self.temperature}
        body |= {"seed": self.seed + question.number, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"return_token_ids": True, **self.extra}
        if self.chat:
            return body | {"messages": [dict(message) for message in question.messages]}
        if len(question.messages) > 1:
            said = f"chat=false sends plain text, and prompt {question.number} has {len(question.messages)} messages"
            raise UserError(f"{said}: expected prompts of one message, or chat=true")
        return body | {"prompt": question.messages[0]["content"]}


def new_client(connections: int, key: str = "") -> httpx.AsyncClient:
    """A client that keeps that many connections open."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max(connections, 1))
    return httpx.AsyncClient(headers=headers, limits=limits, trust_env=False)


async def ask(client: httpx.AsyncClient, url: str, model: str, question: Question, asking: Asking) -> Answer:
    """Send one question. A failure that may pass is the answer's ``error``.
    Raises UserError where the server refuses the request, which it would do again."""
    path = "/v1/chat/completions" if asking.chat else "/v1/completions"
    body = asking.payload(model, question)
    limits = httpx.Timeout(asking.stall, connect=min(asking.stall, 30.0), pool=None)
    answer = Answer(question, time.perf_counter())
    try:
        async with (
            asyncio.timeout(asking.timeout),
            client.stream("POST", url + path, json=body, timeout=limits) as response,
        ):
            if response.status_code != 200:
                data = (await response.aread()).decode(errors="replace")
                _refused(url + path, response.status_code, data, question)
                answer.error = f"status {response.status_code}"
                return answer
            ended = await _read(response, answer)
        if not ended:
            answer.error = "ended early"
        elif not answer.arrivals:
            answer.error = "no text"
    except httpx.TimeoutException:
        answer.error = f"nothing for {asking.stall:g} s"
    except TimeoutError:
        answer.error = f"not whole after {asking.timeout:g} s"
    except httpx.HTTPError as error:
        answer.error = type(error).__name__
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        answer.error = "no OpenAI protocol"
    return answer


async def _read(response: httpx.Response, answer: Answer) -> bool:
    """Note the pieces; whether the answer's end was among them."""
    ended, counted = False, 0
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        now, data = time.perf_counter(), line[5:].strip()
        if data == "[DONE]":
            break
        found = json.loads(data)
        if "error" in found:
            answer.error = "an error inside of the answer"
            return True
        if usage := found.get("usage"):
            counted = usage["completion_tokens"]
        for choice in found.get("choices", []):
            delta = choice.get("delta") or choice
            # Servers call what a model thinks before it answers by two names.
            text = "".join(delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content", "text"))
            ids = choice.get("token_ids") or []
            if text or ids:
                answer.arrivals.append(now)
            answer.text += text
            answer.ids += ids
            ended = ended or choice.get("finish_reason") is not None
    answer.tokens = counted or len(answer.ids)
    if ended and not answer.tokens and answer.arrivals:
        answer.error = "no count of its tokens"
    return ended


def _refused(address: str, status: int, said: str, question: Question) -> None:
    if status in _LATER or status >= 500:
        return
    said = " ".join(said.split())[:_SHOWN]
    refused = f"{address} refuses prompt {question.number} with status {status} ({said})"
    mend = "expected an OpenAI-compatible server whose model has room for it; shorten prompts or see model=, chat="
    raise UserError(f"{refused}: {mend}")


def model_of(url: str, key: str = "", timeout: float = 30.0) -> str:
    """The only model that a server has. Raises UserError if there is none, or several."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        found = httpx.get(f"{url}/v1/models", headers=headers, timeout=timeout, trust_env=False)
        names: Sequence[str] = [entry["id"] for entry in found.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        said = f"no OpenAI-compatible server answers at {url} ({type(error).__name__})"
        raise UserError(f"{said}: expected its address, such as http://localhost:8000") from error
    if len(names) != 1:
        raise UserError(f"the server {url} serves {', '.join(names) or 'no model'}: name one with model=")
    return names[0]
