"""A server that speaks OpenAI's protocol answers, many requests at a time.

Token ids go in and come out where the server knows them, as ``vllm serve`` does (``/v1/completions`` with
``return_token_ids``): training then sees the very tokens that were sampled. Other servers get the conversation
(``/v1/chat/completions``) and give words, which the target's tokenizer splits anew. What that loses: where the sampled
tokens began and ended, special tokens and tool calls in an answer, and the certainty that the server's chat template
is the target's; a document's beginning cannot be continued at all.
"""

import json
import os
import random
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from typing import TYPE_CHECKING, Any

import anyio
import httpx
from anyio.from_thread import start_blocking_portal

from specdraft.data.regeneration.request import Ids, RegenerationSettings, Request
from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.targets import Target

_TRY_AGAIN = {408, 409, 425, 429}  # and every 5xx
_LONGEST_WAIT = 60.0  # seconds


class _TransientError(Exception):
    """A failure that may pass. ``wait``: seconds that the server asked for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class Server:
    """A running server at ``url``. Failures that may pass are tried again; the first that lasts ends the work."""

    name = "server"

    def __init__(
        self,
        url: str,
        model: str | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        attempts: int = 6,
        backoff: float = 1.0,
        api_key_variable: str | None = None,
    ) -> None:
        """Check the settings; nothing is sent yet.

        ``timeout``: seconds that one request may take. ``attempts``: of one request; the k-th waits up to
        ``backoff`` * 2**k seconds for the next, or as long as the server asks, never above a minute.
        ``api_key_variable`` names the environment variable that holds the key. Raises UserError.
        """
        if not url.startswith(("http://", "https://")):
            raise UserError(f"generator.url is {url!r}: expected the server's address, such as http://localhost:8000")
        if concurrency < 1 or attempts < 1 or timeout <= 0 or backoff < 0:
            raise UserError(
                f"the generator has concurrency={concurrency}, attempts={attempts}, timeout={timeout} and "
                f"backoff={backoff}: expected at least 1 request and attempt, and positive seconds"
            )
        self._key = ""
        if api_key_variable is not None:
            self._key = os.environ.get(api_key_variable, "")
            if not self._key:
                raise UserError(
                    f"generator.api_key_variable names {api_key_variable}, which is not set: export it, or choose null"
                )
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.model = model
        self.concurrency, self.timeout, self.attempts, self.backoff = concurrency, timeout, attempts, backoff
        self._takes_ids: bool | None = None

    def answers(
        self,
        target: "Target",
        requests: Sequence[Request],
        settings: RegenerationSettings,
        known: Container[int] = frozenset(),
    ) -> Iterator[tuple[int, Ids]]:
        """As ``Engine`` says; answers come as they arrive."""
        numbers = [number for number in range(len(requests)) if number not in known]
        if not numbers:
            return
        asking = _Asking(self, target, settings)
        with start_blocking_portal() as portal:
            portal.call(asking.open, requests[numbers[0]])
            futures = {portal.start_task_soon(asking.ask, requests[number]): number for number in numbers}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                for future in futures:
                    future.cancel()
                portal.call(asking.client.aclose)

    def close(self) -> None:
        """Connections are closed already; what the server can do is asked anew."""
        self._takes_ids = None

    async def prepare(self, asking: "_Asking", request: Request) -> bool:
        """Find the model's name if it is open; whether the server takes and gives token ids for it."""
        if self.model is None:
            served = [entry["id"] for entry in (await asking.send("GET", "/models"))["data"]]
            if len(served) != 1:
                raise UserError(
                    f"the server {self.url} serves {', '.join(served) or 'no model'}: name one with generator.model"
                )
            self.model = served[0]
        if self._takes_ids is None:
            try:
                body = await asking.send("POST", "/completions", asking.with_ids(request) | {"max_tokens": 1})
                self._takes_ids = isinstance(body["choices"][0].get("token_ids"), list)
            except _RefusedError:
                self._takes_ids = False
        return self._takes_ids


class _RefusedError(UserError):
    """The server does not want this request, now or later."""


class _Asking:
    """The requests of one call of ``answers``. Lives in the thread that has the event loop."""

    def __init__(self, server: Server, target: "Target", settings: RegenerationSettings) -> None:
        self.server, self.target, self.settings = server, target, settings
        headers = {"Authorization": f"Bearer {server._key}"} if server._key else {}
        limits = httpx.Limits(max_connections=server.concurrency, max_keepalive_connections=server.concurrency)
        self.client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)  # send has a limit of its own
        self._slots = anyio.CapacityLimiter(server.concurrency)
        self._takes_ids = False
        self._ended_by: UserError | None = None
        self._random = random.Random()

    async def open(self, request: Request) -> None:
        """Learn what the server takes. Raises UserError."""
        try:
            self._takes_ids = await self.server.prepare(self, request)
        except BaseException:
            await self.client.aclose()
            raise

    async def ask(self, request: Request) -> Ids:
        """The answer's ids. Raises UserError; the first one ends the requests that wait for a slot, unsent."""
        async with self._slots:
            # Not left to whoever reads the futures: that is another thread, and hears of it after the next was sent.
            if self._ended_by is not None:
                raise self._ended_by
            try:
                return await (self._ids(request) if self._takes_ids else self._words(request))
            except UserError as error:
                self._ended_by = error
                raise

    def with_ids(self, request: Request) -> dict[str, Any]:
        """A request for token ids that ends and samples as the target does, whatever the server's defaults are."""
        return {
            "model": self.server.model,
            "prompt": request.prompt,
            "max_tokens": self.settings.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.target.eos_token_ids),
            "ignore_eos": True,
            "return_token_ids": True,
        }

    async def _ids(self, request: Request) -> Ids:
        body = await self.send("POST", "/completions", self.with_ids(request), lambda b: b["choices"][0]["token_ids"])
        ids = body["choices"][0]["token_ids"]
        if not all(isinstance(token, int) and 0 <= token < self.target.vocab_size for token in ids):
            raise UserError(
                f"the server {self.server.url} answers with tokens that the target {self.target.identity.name} does "
                f"not have: expected {self.server.model} to be that target"
            )
        return ids

    async def _words(self, request: Request) -> Ids:
        if not request.messages:
            raise UserError(
                f"the server {self.server.url} gives no token ids, and a document's beginning is no conversation: "
                "use conversations, or a server that knows return_token_ids, as vllm serve does"
            )
        payload: dict[str, Any] = {
            "model": self.server.model,
            "messages": [dict(message) for message in request.messages],
            "max_tokens": self.settings.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "top_p": 1.0,
        }
        if request.tools:
            payload["tools"] = [dict(tool) for tool in request.tools]
        body = await self.send("POST", "/chat/completions", payload, lambda b: b["choices"][0]["message"])
        choice = body["choices"][0]
        words = choice["message"].get("content")
        if not words:
            return []
        tokenizer = self.target.tokenizer
        ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        if choice.get("finish_reason") != "stop":
            return ids
        end = tokenizer.eos_token_id
        return [*ids, end if end in self.target.eos_token_ids else min(self.target.eos_token_ids)]

    async def send(
        self, method: str, path: str, payload: Mapping[str, Any] | None = None, check: Any = lambda body: body
    ) -> Any:
        """The server's JSON, which ``check`` can look into; tries again where that may help. Raises UserError."""
        server = self.server
        for attempt in range(1, server.attempts + 1):
            try:
                with anyio.fail_after(server.timeout):
                    return await self._send_once(method, path, payload, check)
            except TimeoutError:
                error = _TransientError(f"no answer within {server.timeout:g} s")
            except _TransientError as failed:
                error = failed
            if attempt < server.attempts:
                # Half of the time is chance, so that requests that failed together do not come back together.
                wait = server.backoff * 2 ** (attempt - 1) * self._random.uniform(0.5, 1)
                await anyio.sleep(min(max(wait, error.wait), _LONGEST_WAIT))
        raise UserError(
            f"the server {server.url} failed {server.attempts} times at one request ({error}): what was answered so "
            "far is kept; see to the server, or lower generator.concurrency, and start again"
        )

    async def _send_once(self, method: str, path: str, payload: Mapping[str, Any] | None, check: Any) -> Any:
        try:
            response = await self.client.request(method, self.server.url + path, json=payload)
        except httpx.TransportError as error:
            raise _TransientError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        status = response.status_code
        if status in _TRY_AGAIN or status >= 500:
            raise _TransientError(f"status {status}", _seconds(response.headers.get("Retry-After")))
        if status >= 300:
            said = " ".join(response.text.split())[:300]
            if self.server._key:
                said = said.replace(self.server._key, "***")
            raise _RefusedError(
                f"the server {self.server.url} refuses {path} with status {status} ({said}): expected an "
                "OpenAI-compatible server that serves the target; check generator.url, generator.model and the API key"
            )
        try:
            body = response.json()
            check(body)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError) as error:
            raise _TransientError("an answer that is no whole JSON of the protocol") from error
        return body


def _seconds(text: str | None) -> float:
    """Of a Retry-After header; a date counts as none."""
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
