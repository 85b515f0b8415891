"""A server that speaks OpenAI's protocol answers, many requests at a time.

Token ids go in and come out where the server knows them, as ``vllm serve`` does (``/v1/completions`` with
``return_token_ids``): training then sees the very tokens that were sampled. Other servers get the conversation
(``/v1/chat/completions``) and give words, to be tokenized again. That loses where the sampled tokens began and ended,
special tokens and tool calls, and the certainty that the chat templates are the same; documents cannot be continued."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdraft.data.regeneration.request import Ids, RegenerationSettings, Request
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.served import SHAPING
from specdraft.errors import UserError
from specdraft.http_client import HttpClient, HttpClients, RefusedError
from specdraft.targets import Target
from specdraft.targets.chat_template import options_of


class Server:
    """A running server at ``url``, or several, which share the work. Failures that may pass are tried again; a server
    whose failures last is not asked again, and the loss of the last one ends the work."""

    name = "server"

    def __init__(self, url: str | Sequence[str], model: str | None = None, **options: Any) -> None:
        """Check the settings; nothing is sent yet. ``options`` are those of ``HttpClients``. Raises UserError."""
        self.model, expected = model, "an OpenAI-compatible server that serves the target"
        self.clients = HttpClients(url, "generator", expected, **options)
        self._known: dict[HttpClient, tuple[str, bool]] = {}  # the model of each, and whether it takes token ids

    def answers(
        self, target: Target, requests: Sequence[Request], settings: RegenerationSettings, known: Container[int] = ()
    ) -> Iterator[tuple[int, Ids]]:
        """As ``Engine`` says; answers come as they arrive."""
        numbers = [number for number in range(len(requests)) if number not in known]
        if not numbers:
            return
        with self.clients as clients:
            for client in clients.living:
                if client not in self._known:
                    model = self.model or _only_model(client)
                    asking = _Asking(client, model, target)
                    self._known[client] = model, asking.gives_ids(requests[numbers[0]])

            def ask(client: HttpClient, request: Request) -> Ids:
                model, takes_ids = self._known[client]
                asking = _Asking(client, model, target)
                return asking.ids(request) if takes_ids else asking.words(request)

            if len(models := {model for model, _ in self._known.values()}) > 1:
                raise UserError(f"the servers serve {', '.join(sorted(models))}: name one with generator.model")
            for place, answer in clients.each(ask, [requests[number] for number in numbers]):
                yield numbers[place], answer

    def close(self) -> None:
        """Connections are closed already; what the servers can do is asked again the next time."""
        self._known.clear()


def _only_model(client: HttpClient) -> str:
    body = client.request("GET", "/models", check=lambda body: [entry["id"] for entry in body["data"]])
    names = [entry["id"] for entry in body["data"]]
    if len(names) != 1:
        said = f"the server {client.url} serves {', '.join(names) or 'no model'}"
        raise UserError(f"{said}: name one with generator.model")
    return names[0]


@dataclass
class _Asking:
    client: HttpClient
    model: str
    target: Target

    def gives_ids(self, request: Request) -> bool:
        """Whether the server takes and gives token ids."""
        try:
            choice = self._choice("/completions", self._with_ids(request) | {"max_tokens": 1})
        except RefusedError:
            return False
        return isinstance(choice.get("token_ids"), list)

    def ids(self, request: Request) -> Ids:
        """The answer's ids, as they were sampled. Raises UserError."""
        choice = self._choice("/completions", self._with_ids(request), lambda choice: iter(choice["token_ids"]))
        ids, name = choice["token_ids"], self.target.identity.name
        if not all(isinstance(token, int) and 0 <= token < self.target.vocab_size for token in ids):
            said = f"the server {self.client.url} answers with tokens that the target {name} does not have"
            raise UserError(f"{said}: expected {self.model} to be that target")
        return ids

    def words(self, request: Request) -> Ids:
        """The answer's ids, from its words. Raises UserError."""
        if not request.messages:
            said = f"the server {self.client.url} gives no token ids, and only answers can be asked for in words"
            raise UserError(
                f"{said}, no document's rest and no user's turn: use conversations, or a server that knows "
                "return_token_ids, as vllm serve does"
            )
        payload = self._common(request) | {"messages": [dict(message) for message in request.messages]}
        if request.tools:
            payload["tools"] = [dict(tool) for tool in request.tools]
        if options := options_of(self.target.tokenizer):
            payload["chat_template_kwargs"] = options
        choice = self._choice("/chat/completions", payload, lambda choice: choice["message"].get("content"))
        words = choice["message"].get("content")
        if not words:
            return []
        tokenizer = self.target.tokenizer
        ids = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        if choice.get("finish_reason") != "stop":
            return ids
        end = tokenizer.eos_token_id
        return [*ids, end if end in self.target.eos_token_ids else min(self.target.eos_token_ids)]

    def _choice(self, path: str, payload: dict[str, Any], check: Callable[[Any], object] = bool) -> Any:
        """The only choice of the server's answer; where ``check`` of it raises an error, it is asked for again."""
        return self.client.request("POST", path, payload, lambda body: check(body["choices"][0]))["choices"][0]

    def _common(self, request: Request) -> dict[str, Any]:
        """In words that all servers know; those that some do not only where they are needed."""
        asked = request.sampling
        neutral, needed = asdict(Sampling()), {name: getattr(asked, name) for name in SHAPING}
        sampling = {"temperature": asked.temperature, "seed": request.seed, "top_p": asked.top_p}
        sampling |= {name: value for name, value in needed.items() if value != neutral[name]}
        return {"model": self.model, "max_tokens": request.max_new_tokens} | sampling

    def _with_ids(self, request: Request) -> dict[str, Any]:
        """A request for token ids that ends and samples as the target does, whatever the server's defaults are."""
        sampling = {name: getattr(request.sampling, name) for name in SHAPING} | {"min_p": 0.0}
        ends = {"stop_token_ids": sorted(self.target.eos_token_ids), "ignore_eos": True}
        return self._common(request) | sampling | ends | {"prompt": request.prompt, "return_token_ids": True}
