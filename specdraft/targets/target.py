"""The frozen target: a ``LanguageModel`` that nobody trains, with its tokenizer and its identity."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdraft.allocation import keep_freed_memory
from specdraft.decoding.compilation import Compilable
from specdraft.errors import UserError, check_switch
from specdraft.onednn import PackedLinear, pack, unpack
from specdraft.targets import loading
from specdraft.targets.chat_template import checked_options
from specdraft.targets.language_model import Features, LanguageModel
from specdraft.targets.server import Connection, Server
from specdraft.targets.sharded import load_partitioned
from specdraft.text import reason

PLACEMENTS = ("replicated", "zero3", "device_map", "remote")


@dataclass(frozen=True)
class TargetIdentity:
    """Which target a drafter belongs to. The hashes catch another model under the same name."""

    name: str
    revision: str | None
    config_hash: str
    weights_hash: str


class Target(LanguageModel):
    """A frozen causal LM. Not an ``nn.Module``, so that no optimizer, checkpoint or engine ever takes it in. ``engine``
    runs its layers where they are sharded over the ranks: every pass then needs all of them. ``server`` reads packed
    sequences in place of the layers that are here."""

    engine: Any = None
    server: Server | None = None

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None = None) -> None:
        """Wrap a loaded model. Raises UserError for an architecture whose features cannot be trusted."""
        super().__init__(model.eval().requires_grad_(False))
        self.tokenizer = tokenizer
        self._connections = ExitStack()  # open as long as the target is there
        self._remote: dict[tuple[int, ...], Connection] = {}  # by auxiliary layers
        self.identity = TargetIdentity(name, revision, loading.config_hash(self.config), loading.weights_hash(model))
        self.check_logits()

    @classmethod
    def load(
        cls,
        name: str,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        attn_implementation: str = "auto",
        trust_remote_code: bool = False,
        placement: str = "replicated",
        max_memory: Mapping[int | str, int | str] | None = None,
        url: str | Sequence[str] | None = None,
        packed: bool = True,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> "Target":
        """Load a hub id, a local directory or ``embedded://tiny``; ``device`` "auto" is the first GPU if there is one.

        ``placement``: replicated is whole on every rank; zero3 shards the layers over the ranks; device_map puts them
        on all devices that a single process sees, within ``max_memory`` (see ``device_map.py``); remote leaves packed
        sequences to the vLLM servers at ``url``, and the layers that decoding needs on disk or within ``max_memory``.
        ``packed``: a whole target on a CPU packs its weights for decoding (see ``onednn.py``).
        ``chat_template_options`` are what conversations are rendered with (see ``chat_template.py``).
        Raises UserError if it cannot be found, does not load, or is not supported."""
        if placement not in PLACEMENTS:
            raise UserError(f"target.placement is {placement!r}: expected one of {', '.join(PLACEMENTS)}")
        check_switch("target.packed", packed)
        check_switch("target.trust_remote_code", trust_remote_code)
        options = checked_options(chat_template_options)
        load = functools.partial(loading.load, name, revision, dtype, attn_implementation, trust_remote_code)
        load = functools.partial(load, chat_template_options=options)
        recorded = loading.recorded_name(name)
        if placement == "zero3":
            loaded = loading.checkpoint_dtype(name, revision, dtype, trust_remote_code)
            model, tokenizer, engine = load_partitioned(load, loaded)
            target = cls(model, tokenizer, recorded, revision)
            target.engine = engine
            return target
        if (placement == "remote") != (url is not None):
            wanted = "the address of a vLLM server, http://localhost:8000 say, with remote and none with the others"
            raise UserError(f"target.placement is {placement} and target.url {url}: expected {wanted}")
        if placement in ("device_map", "remote"):
            from specdraft.targets.device_map import device_map  # engines' environments do without accelerate

            places = device_map(name, revision, dtype, trust_remote_code, max_memory, placement == "device_map")
            target = cls(*load(device_map=places), recorded, revision)
            target.server = None if url is None else Server(url)
            return target
        place = _device(device)
        model, tokenizer = load()
        target = cls(model.to(place), tokenizer, recorded, revision)
        if target.device.type == "cpu":
            keep_freed_memory()
            if packed:
                target.pack()
        return target

    @property
    def packed(self) -> bool:
        """Whether the weights are packed for decoding on a CPU."""
        return any(isinstance(module, PackedLinear) for module in self.model.modules())

    @functools.cached_property
    def _compilable(self) -> Compilable:
        return Compilable(self._forward, self.architecture, self._hidden_states, frozen=True)

    def _forget_graphs(self) -> None:
        """They take the layers for those that they were made of, where these lay."""
        self.__dict__.pop("_compilable", None)

    @torch.no_grad()
    def pack(self) -> None:
        """Pack the weights for decoding on a CPU (``onednn.py``), unless the model then says something else."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        pack(self.model)
        self._forget_graphs()
        try:
            found = self.model(input_ids=ids, use_cache=False).logits.float()
            difference = (found - expected).abs().max().item()
            amiss = "" if difference < self._tolerance * max(1.0, expected.abs().max().item()) else f"{difference:.2g}"
        except RuntimeError as error:  # a model that uses a layer's weight beside the layer
            amiss = reason(error)
        if amiss:
            unpack(self.model)
            what = f"the weights of {self.architecture} stay unpacked, decoding is slower"
            warnings.warn(f"{what} ({amiss})", stacklevel=2)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any = None, name: str = "in-memory") -> "Target":
        """Wrap a model that is already in memory."""
        return cls(model, tokenizer, name)

    def features(self, input_ids: Tensor, position_ids: Tensor, layers: Sequence[int] = ()) -> Features:
        """As ``LanguageModel.features``, by the server if there is one. Raises UserError for what it does wrong."""
        if self.server is None:
            return super().features(input_ids, position_ids, layers)
        return self.connection(self.server, layers).features(input_ids, position_ids)

    def connection(self, server: Server, layers: Sequence[int]) -> Connection:
        """The connection to the server about these layers, made and checked once. Raises UserError."""
        key = tuple(layers)
        if key not in self._remote:
            self._remote[key] = self._connections.enter_context(server.connect(self, key))
        return self._remote[key]

    @property
    def embedding_weight(self) -> Tensor:
        """The raw embedding rows ``[V, H]``, without a multiplier: what serving engines share with a drafter."""
        return self.model.get_input_embeddings().weight

    @property
    def sliding_window(self) -> int | None:
        """How many positions attention sees, where it is a window in every layer; else None."""
        kinds = set(getattr(self.config, "layer_types", None) or ("sliding_attention",))
        return getattr(self.config, "sliding_window", None) if kinds == {"sliding_attention"} else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text in engines: those of the generation config, else the configuration, and the tokenizer."""
        ids = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if ids is None:
            ids = getattr(self.config, "eos_token_id", None)
        own = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or ()) | frozenset([] if own is None else [own])

    @property
    def generation_settings(self) -> dict[str, Any]:
        """What the model is published to be sampled with: its generation_config.json as engines read it, which leave
        out what is transformers' default."""
        config = getattr(self.model, "generation_config", None)
        return {} if config is None else config.to_diff_dict()

    def to(self, device: torch.device | str) -> "Target":
        """Move the weights; those that are sharded over ranks or spread over devices stay where they are."""
        if self.engine is None and not hasattr(self.model, "hf_device_map"):
            if torch.device(device).type != "cpu":
                unpack(self.model)
            self.model.to(device)
            self._forget_graphs()
        return self

    def default_layers(self) -> tuple[int, ...]:
        """The three layers that EAGLE-3 fuses, ``(2, L//2, L-3)``, as every serving engine has it; where these collide,
        the nearest three distinct ones. Raises UserError below 4 layers."""
        layers = (2, self.num_layers // 2, self.num_layers - 3)
        if 2 < layers[1] < layers[2]:
            return layers
        if self.num_layers < 4:
            raise UserError(f"the target has {self.num_layers} layers: EAGLE-3 fuses three inner ones and needs 4")
        return (1, self.num_layers // 2, self.num_layers - 1)

    def check_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """``layers`` as a tuple. Raises UserError unless sorted, distinct and within 1..L: vLLM and TensorRT-LLM sort
        and deduplicate the ids, so any other order would be served wrongly. L, the last layer's output before the final
        norm, is not handed out by every engine."""
        checked = tuple(int(layer) for layer in layers)
        if list(checked) != sorted(set(checked)) or any(not 1 <= k <= self.num_layers for k in checked):
            wanted = f"ascending, distinct numbers from 1 to {self.num_layers}"
            raise UserError(f"auxiliary layers are {list(checked)}: expected {wanted}")
        return checked


def _device(wanted: str) -> str:
    """The device of that name; "auto" is the first GPU if there is one. Raises UserError for one that is not there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        expected = "expected auto, cpu, or a device that torch sees here, as cuda"
        raise UserError(f"target.device is {wanted!r} ({reason(error)}): {expected}") from error
    return wanted
