"""A server that speaks OpenAI's protocol answers, many requests at a time.

Token ids go in and come out where the server knows them, as ``vllm serve`` does (``/v1/completions`` with
``return_token_ids``): training then sees the very tokens that were sampled. Other servers get the conversation
(``/v1/chat/completions``) and give words, which the target's tokenizer tokenizes again. That loses where the sampled
tokens began and ended, special tokens and tool calls in an answer, and the certainty that the server's chat template
is the target's; a document's beginning cannot be continued at all.
"""

from collections.abc import Container, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specdraft.data.regeneration.request import Ids, RegenerationSettings, Request
from specdraft.errors import UserError
from specdraft.http_client import HttpClient, RefusedError

if TYPE_CHECKING:
    from specdraft.targets import Target


class Server:
    """A running server at ``url``. Failures that may pass are tried again; the first that lasts ends the work."""

    name = "server"

    def __init__(self, url: str, model: str | None = None, **options: Any) -> None:
        """Check the settings; nothing is sent yet. ``options`` are those of ``HttpClient``. Raises UserError."""
        self.model = model
        self.client = partial(
            HttpClient, url, "generator", "an OpenAI-compatible server that serves the target", **options
        )
        self.client()
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
        with self.client() as client:
            if self.model is None:
                self.model = _only_model(client)
            asking = _Asking(client, self.model, target, settings)
            if self._takes_ids is None:
                self._takes_ids = asking.gives_ids(requests[numbers[0]])
            ask = asking.ids if self._takes_ids else asking.words
            for place, answer in client.each(ask, [requests[number] for number in numbers]):
                yield numbers[place], answer

    def close(self) -> None:
        """Connections are closed already; what the server can do is asked again the next time."""
        self._takes_ids = None


def _only_model(client: HttpClient) -> str:
    served = client.request("GET", "/models", check=lambda body: [entry["id"] for entry in body["data"]])["data"]
    names = [entry["id"] for entry in served]
    if len(names) != 1:
        raise UserError(
            f"the server {client.url} serves {', '.join(names) or 'no model'}: name one with generator.model"
        )
    return names[0]


class _Asking:
    """What the requests of one call of ``answers`` have in common."""

    def __init__(self, client: HttpClient, model: str, target: "Target", settings: RegenerationSettings) -> None:
        self.client, self.model, self.target, self.settings = client, model, target, settings

    def gives_ids(self, request: Request) -> bool:
        """Whether the server takes and gives token ids."""
        try:
            body = self.client.request("POST", "/completions", self._with_ids(request) | {"max_tokens": 1}, _choice)
        except RefusedError:
            return False
        return isinstance(_choice(body).get("token_ids"), list)

    def ids(self, request: Request) -> Ids:
        """The answer's ids, as they were sampled. Raises UserError."""
        body = self.client.request(
            "POST", "/completions", self._with_ids(request), lambda body: iter(_choice(body)["token_ids"])
        )
        ids = _choice(body)["token_ids"]
        if not all(isinstance(token, int) and 0 <= token < self.target.vocab_size for token in ids):
            raise UserError(
                f"the server {self.client.url} answers with tokens that the target {self.target.identity.name} does "
                f"not have: expected {self.model} to be that target"
            )
        return ids

    def words(self, request: Request) -> Ids:
        """The answer's ids, from its words. Raises UserError."""
        if not request.messages:
            raise UserError(
                f"the server {self.client.url} gives no token ids, and a document's beginning is no conversation: "
                "use conversations, or a server that knows return_token_ids, as vllm serve does"
            )
        payload = self._common(request) | {"messages": [dict(message) for message in request.messages]}
        if request.tools:
            payload["tools"] = [dict(tool) for tool in request.tools]
        body = self.client.request(
            "POST", "/chat/completions", payload, lambda body: _choice(body)["message"].get("content")
        )
        choice = _choice(body)
        words = choice["message"].get("content")
        if not words:
            return []
        tokenizer = self.target.tokenizer
        ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        if choice.get("finish_reason") != "stop":
            return ids
        end = tokenizer.eos_token_id
        return [*ids, end if end in self.target.eos_token_ids else min(self.target.eos_token_ids)]

    def _common(self, request: Request) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": self.settings.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "top_p": 1.0,
        }

    def _with_ids(self, request: Request) -> dict[str, Any]:
        """A request for token ids that ends and samples as the target does, whatever the server's defaults are."""
        return self._common(request) | {
            "prompt": request.prompt,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.target.eos_token_ids),
            "ignore_eos": True,
            "return_token_ids": True,
        }


def _choice(body: Any) -> Any:
    return body["choices"][0]
