"""Hidden states from a running vLLM server, which leaves them in files that this process can open too.

B = sequences, T = tokens in a sequence, n = tokens of a document, a = layers, L = all layers, e = extracted ones, H =
hidden size.

The server extracts the drafter's layers and layer L. vLLM numbers layers as we do, "after k layers", and its layer L is
the hidden state before the final norm: the norm is applied here, by the target's own module. A packed sequence
is sent document by document, as no document may see another.

vLLM answers before it has written the file. Beside it lies a lock, which its writer holds until it is done."""

import fcntl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdraft.errors import UserError
from specdraft.http_client import HttpClient, HttpClients, LostError
from specdraft.targets.language_model import Capture, Features, LanguageModel

_PROBE = 32  # tokens
# Of two engines' hidden states of a token, relative to its norm; neighboring layers differ by a tenth and more.
_SAME_FP32, _SAME = 1e-3, 5e-2


def extracted(target: LanguageModel, layers: Sequence[int]) -> list[int]:
    """The layers that vLLM has to extract, ascending: the drafter's, and the last one, which may be among them."""
    return sorted({*layers, target.num_layers})


class Server:
    """A server that somebody started, or several; docs/store.md says how. This process sees the disk of their files."""

    def __init__(self, url: str | Sequence[str], model: str | None = None, **options: Any) -> None:
        """Check the settings; nothing is sent yet. ``model``: None takes the first one served. ``options`` are those of
        ``HttpClients``, which ask for documents. Raises UserError."""
        self.model = model
        self.clients = partial(HttpClients, url, "features", "vLLM's server", **options)
        self.clients()

    @contextmanager
    def connect(self, target: LanguageModel, layers: Sequence[int]) -> Iterator["Connection"]:
        """Connect. Raises UserError unless every server gives the hidden states that the target gives here."""
        with self.clients() as clients:
            connection = Connection(clients, self.model, target, layers)
            for client in clients.all:
                connection.check(client)
            yield connection

    @contextmanager
    def open(self, target: LanguageModel, layers: Sequence[int], sequence_length: int) -> Iterator[Capture]:
        """As ``FeatureSource`` says. Raises UserError."""
        with self.connect(target, layers) as connection:
            yield connection.features


class Connection:
    """A conversation with servers about the hidden states of one target. One batch is read at a time."""

    def __init__(self, clients: HttpClients, model: str | None, target: LanguageModel, layers: Sequence[int]) -> None:
        """Ask for the models' names. Raises UserError if there is no answer."""
        self.clients, self.target, self.layers = clients, target, tuple(layers)
        self.models = {
            client: model or _first_model(client.request("GET", "/models", check=_first_model))
            for client in clients.all
        }
        self.foresees = True  # whether what is read ahead of its use is what will be used
        self._one = threading.Lock()

    def features(self, input_ids: Tensor, position_ids: Tensor) -> Features:
        """Features of packed sequences ``[B, T]``. Raises UserError."""
        return self.finish(self.read(input_ids, position_ids))

    def read(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """What the servers extract of packed sequences, ``[B, T, e, H]`` on the CPU, their documents read side by side;
        any thread may ask. Raises UserError."""
        begins = (position_ids.flatten() == 0).nonzero().flatten()
        documents = [ids.tolist() for ids in input_ids.flatten().tensor_split(begins[1:].cpu())]
        with self._one:
            by_number = dict(self.clients.each(self._states, documents))
        found = torch.cat([by_number[number] for number in range(len(documents))])  # [B*T, e, H]
        return found.unflatten(0, input_ids.shape)

    def finish(self, states: Tensor) -> Features:
        """Features ``[B, T, ...]`` of what ``read`` gave, on the target's device."""
        on_gpu = self.target.device.type == "cuda"  # where copies from pinned memory need no waiting
        states = states.to(self.target.device, non_blocking=on_gpu).to(self.target.dtype)
        return Features(states[..., : len(self.layers), :].flatten(-2), self.target.norm(states[..., -1, :]))

    @torch.inference_mode()
    def check(self, client: HttpClient) -> None:
        """Raises UserError unless a short text has the target's own hidden states: its layers, its weights."""
        ids = torch.arange(1, 1 + _PROBE)[None] % self.target.vocab_size
        positions = torch.arange(_PROBE)[None]
        states = self._states(client, ids[0].tolist())
        theirs = self.finish(states[None])
        device = self.target.device
        # By the weights of this process, also where a server reads the rest of the data.
        ours = LanguageModel.features(self.target, ids.to(device), positions.to(device), self.layers)
        same = _SAME_FP32 if states.dtype == self.target.dtype == torch.float32 else _SAME
        names = [f"layer {layer}" for layer in self.layers] + ["the last layer"]
        pairs = [torch.cat([f.aux, f.last], -1).unflatten(-1, (len(names), -1))[0].float() for f in (theirs, ours)]
        # The median, because the first token's norm may be of another magnitude.
        errors = ((pairs[0] - pairs[1]).norm(dim=-1) / pairs[1].norm(dim=-1)).median(0).values
        worst = int(errors.argmax())
        if not errors[worst] < same:
            raise UserError(
                f"the server {client.url} gives hidden states of {names[worst]} that differ from those of "
                f"the target here, a {self.target.architecture}, by {errors[worst]:.2g} of their norm, expected less "
                f"than {same}: serve that model, and extract layers {extracted(self.target, self.layers)}"
            )

    def _states(self, client: HttpClient, ids: list[int]) -> Tensor:
        """What the server extracts of a document, ``[n, e, H]``."""
        body = {"model": self.models[client], "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        answer = client.request("POST", "/completions", body, lambda answer: answer.get("kv_transfer_params"))
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if path is None:
            wanted = "vLLM with the method extract_hidden_states and its connector; docs/store.md says how to start it"
            raise UserError(f"the server {client.url} sends no hidden states: expected {wanted}")
        tensors = take(Path(path), client)
        states, layers = tensors["hidden_states"], extracted(self.target, self.layers)
        expected = [len(ids), len(layers), self.target.hidden_size]
        if tensors["token_ids"].tolist() != ids or list(states.shape) != expected:
            raise UserError(
                f"the server {client.url} extracts hidden states of shape {list(states.shape)} for "
                f"{len(ids)} tokens: expected {expected}, of layers {layers}; start it with those, as docs/store.md "
                "says"
            )
        return states


def _first_model(body: Any) -> str:
    return body["data"][0]["id"]


def take(path: Path, client: HttpClient) -> dict[str, Tensor]:
    """The tensors of a file that vLLM's connector writes, once it is written; the file is deleted then. Raises
    LostError if it does not come within the client's ``timeout``."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        with lock.open() as held:
            _wait(held, client)
            tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        wanted = "a file that vLLM has written to a disk that this machine sees; see shared_storage_path and vLLM's log"
        said = f"cannot read the hidden states {path} ({error})"
        raise LostError(f"{said}: expected {wanted}", f"left {path.name} unwritten") from error
    path.unlink()
    lock.unlink()
    return tensors


def _wait(lock: IO[str], client: HttpClient) -> None:
    """Until the writer has let go of the lock; a writer that died has."""
    deadline = time.monotonic() + client.timeout
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not written within {client.timeout:g} s") from None
            client.sleep(0.002)
