"""What decoding and distillation need of a causal LM: hidden states of packed sequences and cached steps, and logits.

B = batch, T = tokens, n = tokens of a step, H = hidden size, V = vocabulary, L = layers, a = auxiliary layers.

A model is never re-implemented: hidden states come from hooks on its own layers, logits from its own final norm and
head. ``check_logits`` compares them with the model's own, so that an architecture with a scale we do not know of is
refused instead of teaching or drafting the wrong distribution.

Layer k means "the hidden state after k decoder layers", transformers' ``hidden_states[k]`` and vLLM's convention; layer
L is the last one's output before the final norm, where transformers has the state after it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdraft.decoding.cache import StaticCache
from specdraft.decoding.compilation import Compilable, is_active
from specdraft.decoding.passes import Pass
from specdraft.decoding.threads import fastest
from specdraft.errors import UserError
from specdraft.targets.masks import attention_masks, takes_masks
from specdraft.targets.packed_attention import Attend, attending, can_pack, is_plain, packing, stepping

# Attention whose keys and values are kept per position, so that a rejected draft can be taken back.
_REWINDABLE = {"full_attention", "sliding_attention", "chunked_attention"}


class Features(NamedTuple):
    """What a model knows of a batch. aux: ``[B, T, a*H]``, the auxiliary hidden states in ascending layer order. last:
    ``[B, T, H]``, the last hidden state after the final norm, the input of the LM head."""

    aux: Tensor
    last: Tensor

    def take(self, positions: Tensor) -> "Features":
        """Those of some ``positions [B, n]`` of every sequence, ``[B, n, ...]``."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return Features(*(part[rows, positions] for part in self))


Capture = Callable[[Tensor, Tensor], Features]
"""Input ids and position ids ``[B, T]`` of packed sequences to features."""


class LanguageModel:
    """A view of a decoder-only causal LM, which stays the owner of its weights. Not an ``nn.Module``."""

    def __init__(self, model: Any) -> None:
        """Look at a transformers model. Raises UserError for an architecture that drafts cannot be taken back in."""
        self.model = model
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        refused = f"the architecture {self.architecture} is not supported"
        has_layers = isinstance(getattr(self.decoder, "layers", None), nn.ModuleList) and hasattr(self.decoder, "norm")
        if model.config.is_encoder_decoder or self.head is None or not has_layers:
            wanted = "a decoder-only causal LM with a list of layers, a final norm and an LM head"
            raise UserError(f"{refused}: expected {wanted}")
        if unsupported := sorted(set(getattr(self.config, "layer_types", None) or ()) - _REWINDABLE):
            state = f"its {', '.join(unsupported)} layers keep a state that cannot take back rejected drafts"
            raise UserError(f"{refused}: {state}; expected attention layers only")
        self.norm = self.decoder.norm
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.num_layers: int = len(self.decoder.layers)
        self.max_length: int = self.config.max_position_embeddings

    @property
    def head(self) -> Any:
        """The LM head."""
        return self.model.get_output_embeddings()

    @property
    def architecture(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    @property
    def device(self) -> torch.device:
        """Where the head lives, and the logits come from."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and the hidden states."""
        return self.head.weight.dtype

    @property
    def logit_scale(self) -> float:
        """What the head's output is multiplied by: Cohere's logit_scale, or one over Granite's logits_scaling."""
        scale, divisor = (getattr(self.config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
        return float(scale) / float(divisor)

    @property
    def logit_softcap(self) -> float | None:
        """The bound c of Gemma 2's c * tanh(logits / c)."""
        return getattr(self.config, "final_logit_softcapping", None)

    def features(self, input_ids: Tensor, position_ids: Tensor, layers: Sequence[int] = ()) -> Features:
        """Features of packed sequences ``[B, T]``; attention stops where ``position_ids`` restart at 0. They carry the
        gradients of whatever weights are trained."""
        if self._packs and not self._runs_again:
            return self._run_by_document(layers, input_ids, position_ids)
        if self._separates_documents:
            return self._run_packed(layers, input_ids, position_ids)
        documents = (position_ids == 0).cumsum(-1)  # [B, T]
        visible = (documents[..., None] == documents[:, None]).tril()
        masks = attention_masks(self.config, visible, position_ids, None, self.dtype)
        # With a cache transformers would attend across documents without a word.
        return self._run(layers, input_ids=input_ids, position_ids=position_ids, attention_mask=masks, use_cache=False)

    def masked_features(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend, visible: Callable[[], Tensor]
    ) -> Features:
        """Features of tokens ``[1, T]`` that see whatever ``attend`` has them see; ``visible`` says the same as a mask,
        bool ``[1, T, T]``, for architectures that ask for more than plain attention. They carry gradients."""
        ids = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if self._is_plain and not self._runs_again:
            with attending(self.config, attend) as arguments:
                return self._run((), **ids, **arguments)
        masks = attention_masks(self.config, visible(), position_ids, None, self.dtype)
        return self._run((), **ids, attention_mask=masks)

    @property
    def _runs_again(self) -> bool:
        """Whether layers will be run again for backward, when they would find another attention than the first time."""
        modules = self.decoder.modules() if torch.is_grad_enabled() else ()
        return any(getattr(module, "gradient_checkpointing", False) for module in modules)

    def _run_packed(self, layers: Sequence[int], input_ids: Tensor, position_ids: Tensor) -> Features:
        """Features ``[B, T, ...]``, where the architecture itself is to stop attention between documents."""
        shape = input_ids.shape
        if not takes_masks(self.config):
            # transformers' flash attention looks for documents in a single sequence only: in a batch of several it
            # would attend across them without a word. Each sequence begins with position 0, a document of its own.
            input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
        features = self._run(layers, input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return Features(*(part.reshape(*shape, part.shape[-1]) for part in features))

    def _run_by_document(self, layers: Sequence[int], input_ids: Tensor, position_ids: Tensor) -> Features:
        """Features ``[B, T, ...]``, with attention by ``packed_attention.py``."""
        ids, positions = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
        with packing(self.config, positions) as documents:
            features = self._run(layers, input_ids=ids, position_ids=positions, use_cache=False, **documents)
        return Features(*(part.reshape(*input_ids.shape, part.shape[-1]) for part in features))

    @functools.cached_property
    def _packs(self) -> bool:
        """Whether attention by document is as fast as any, and what the architecture means."""
        return can_pack(self.config, self.device, self.dtype) and self._is_plain

    @functools.cached_property
    def _is_plain(self) -> bool:
        """Whether plain causal attention is what the architecture means."""
        return is_plain(self.config) and self._keeps_apart(self._run_by_document)

    @functools.cached_property
    def _separates_documents(self) -> bool:
        """Whether the architecture itself stops attention where positions restart; gpt-oss, for one, does not."""
        return self._keeps_apart(self._run_packed)

    @torch.inference_mode()
    def _keeps_apart(self, run: Callable[[Sequence[int], Tensor, Tensor], Features]) -> bool:
        """Whether documents do not see each other. Asked with two sequences of two. A doubt costs an explicit mask,
        never a wrong distribution."""
        ids = torch.arange(1, 17, device=self.device).view(2, 8) % self.vocab_size
        positions = torch.arange(4, device=self.device).repeat(2, 2)  # [2, 8]
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # what training rounds to is no difference
        try:
            with torch.autocast(self.device.type, enabled=False):
                packed = run((), ids, positions).last.reshape(4, 4, -1)
                alone = self._run((), input_ids=ids.view(4, 4), position_ids=positions.view(4, 4), use_cache=False).last
        finally:
            torch.set_float32_matmul_precision(precision)
        difference = (packed - alone).abs().max().item()
        return difference < self._tolerance * max(1.0, alone.abs().max().item())

    @property
    def _tolerance(self) -> float:
        """Differences below it, beside values of one, are those of floating point."""
        return 1e-4 if self.dtype in (torch.float32, torch.float64) else 2e-2

    @torch.inference_mode()
    def step(self, reading: Pass, cache: StaticCache, layers: Sequence[int] = (), first: int = 0) -> Features:
        """Features ``[B, n, ...]`` of the tokens that B requests read next, those from ``first`` on, whose keys and
        values are written into the cache. Sliding windows are applied on top of what a pass says each token sees.
        Raises UserError where it says so and the attention implementation takes no masks."""
        cache.begin(reading, first)
        ids, positions, places, visible, held, size = reading
        if visible is None and held and ids.shape[1] > 1 and takes_masks(self.config):
            # What transformers would work out from the lengths, in a tenth of the operations.
            visible = torch.arange(size, device=ids.device) <= places[..., None]
        cached = self.device.type == "cpu" and (held or visible is not None)
        with stepping(self.config) if cached else nullcontext():
            masks = None if visible is None else attention_masks(self.config, visible, positions, places, self.dtype)
            arguments = ids, positions, masks, cache, tuple(layers)
            # A prompt's pass is long, and of another length each time: nothing to compile.
            if not held or not is_active():
                return Features(*self._forward(*arguments))
            with self._made_for_graphs():
                return Features(*self._compilable(ids.shape[1], *arguments))

    @contextmanager
    def _made_for_graphs(self) -> Iterator[None]:
        """Inside, a mixture of experts does not visit one expert after the other, which no graph can hold; gathering
        the experts of every token would take too much memory for a prompt. And transformers leaves the last layer's
        output among the hidden states as it is, before the final norm."""
        config = self.decoder.config
        experts, tied = (getattr(config, name, None) for name in ("_experts_implementation", "tie_last_hidden_states"))
        if experts == "eager":
            config._experts_implementation = "batched_mm"
        config.tie_last_hidden_states = False
        try:
            yield
        finally:
            config.tie_last_hidden_states = tied
            if experts == "eager":
                config._experts_implementation = experts

    @functools.cached_property
    def _compilable(self) -> Compilable:
        return Compilable(self._forward, self.architecture, self._hidden_states)

    def _hidden_states(self) -> None:
        """Have transformers install what gives all hidden states, which it does when they are first asked for, and
        cannot do in a graph."""
        ids = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        self.decoder(input_ids=ids, use_cache=False, output_hidden_states=True)

    def _forward(
        self, ids: Tensor, positions: Tensor, masks: Any, cache: StaticCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Auxiliary and last hidden states of a pass with a cache."""
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": masks, "past_key_values": cache}
        if not torch.compiler.is_compiling():
            features = self._run(layers, **inputs, use_cache=True)
            return features.aux, features.last
        # A graph cannot hold hooks that come and go; transformers has all hidden states at hand in it.
        found = self.decoder(**inputs, use_cache=True, output_hidden_states=True)
        last = found.last_hidden_state
        return torch.cat([found.hidden_states[k] for k in layers], dim=-1) if layers else last[..., :0], last

    def logits(self, last: Tensor) -> Tensor:
        """Logits ``[..., V]`` of hidden states after the final norm ``[..., H]``: own head, scale and soft-cap."""
        logits = self.head(last)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    @functools.cached_property
    def decoding_threads(self) -> int | None:
        """The threads of a CPU with which a pass over a few tokens is fastest, measured once; None where others decide:
        on other devices, and where every rank takes part in a pass."""
        if self.device.type != "cpu" or getattr(self, "engine", None) is not None:
            return None
        cache, reading = self.new_cache(1, 8), Pass.prompt([0] * 4, self.device)

        def run() -> None:
            self.logits(self.step(reading, cache).last)

        return fastest(run)

    def new_cache(self, rows: int, capacity: int) -> StaticCache:
        """An empty cache with room for ``capacity`` tokens of each of ``rows`` requests."""
        return StaticCache(self.num_layers, rows, capacity)

    @torch.inference_mode()
    def check_logits(self) -> None:
        """Raises UserError unless ``logits`` of ``features`` are the model's own logits."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.logits(self._run((), input_ids=ids, use_cache=False).last).float()
        difference = (ours - expected).abs().max().item()
        if not difference < self._tolerance * max(1.0, expected.abs().max().item()):
            raise UserError(
                f"the architecture {self.architecture} is not supported: logits from its hidden states differ from its "
                f"own by {difference:.2g}; expected equality, so it transforms them in an unknown way"
            )

    def _run(self, layers: Sequence[int], **inputs: Any) -> Features:
        captured: dict[int, Tensor] = {}

        def capture(k: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
            # A target that is spread over devices leaves its layers' outputs where the layers are.
            captured[k] = (output if isinstance(output, Tensor) else output[0]).to(self.device)

        # Hooks live for one call: engines that wrap the model remove or bypass longer-lived ones.
        with ExitStack() as hooks:
            for k in layers:
                layer = self.decoder.layers[k - 1]
                hooks.enter_context(layer.register_forward_hook(functools.partial(capture, k)))
            last = self.decoder(**inputs).last_hidden_state.to(self.device)
        aux = torch.cat([captured[k] for k in layers], dim=-1) if layers else last[..., :0]  # [B, T, a*H]
        return Features(aux, last)
