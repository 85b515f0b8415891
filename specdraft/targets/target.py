"""The frozen target.

B = batch, T = tokens, H = hidden size, V = vocabulary, L = layers, n = number of auxiliary layers.

The target is never re-implemented: hidden states come from hooks on its own layers, logits from its own final norm
and head. Loading ends with a check that logits computed this way equal the model's own, so that an architecture with
a scale we do not know of is refused instead of teaching a drafter the wrong distribution.

Layer k means "the hidden state after k decoder layers", transformers' ``hidden_states[k]`` and vLLM's convention.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdraft.decoding.cache import RewindableCache
from specdraft.errors import UserError
from specdraft.targets import loading
from specdraft.targets.masks import attention_masks

# Attention whose keys and values are kept per position, so that a rejected draft can be taken back.
_REWINDABLE = {"full_attention", "sliding_attention", "chunked_attention"}


class Features(NamedTuple):
    """What the target knows of a batch. aux: ``[B, T, n*H]``, the auxiliary hidden states in ascending layer order.

    last: ``[B, T, H]``, the last hidden state after the final norm, the input of the LM head.
    """

    aux: Tensor
    last: Tensor


def _decoder(model: Any) -> Any:
    return model.get_decoder() if hasattr(model, "get_decoder") else None


@dataclass(frozen=True)
class TargetIdentity:
    """Which target a drafter belongs to. The hashes catch another model under the same name."""

    name: str
    revision: str | None
    config_hash: str
    weights_hash: str


class Target:
    """A frozen causal LM. Not an ``nn.Module``, so that no optimizer, checkpoint or engine ever takes it in."""

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None = None) -> None:
        """Wrap a loaded model. Raises UserError for an architecture whose features cannot be trusted."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config()
        architecture = type(model).__name__
        self.decoder = _decoder(model)
        self.head = model.get_output_embeddings()
        if (
            model.config.is_encoder_decoder
            or self.head is None
            or not isinstance(getattr(self.decoder, "layers", None), nn.ModuleList)
            or not hasattr(self.decoder, "norm")
        ):
            raise UserError(
                f"the architecture {architecture} is not supported: "
                "expected a decoder-only causal LM with a list of layers, a final norm and an LM head"
            )
        unsupported = set(getattr(self.config, "layer_types", None) or ()) - _REWINDABLE
        if unsupported:
            raise UserError(
                f"the architecture {architecture} is not supported: its {', '.join(sorted(unsupported))} layers keep "
                "a state that cannot take back rejected drafts; expected attention layers only"
            )
        self.norm = self.decoder.norm
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]
        self.num_layers: int = len(self.decoder.layers)
        self.max_length: int = self.config.max_position_embeddings
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self._scale = self._logit_scale()
        self.identity = TargetIdentity(name, revision, loading.config_hash(self.config), loading.weights_hash(model))
        self._check_logits(architecture)

    @classmethod
    def load(
        cls,
        name: str,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
    ) -> "Target":
        """Load a hub id, a local directory or ``embedded://tiny``; ``device`` "auto" is the first GPU if there is one.

        Raises UserError if it cannot be found, does not load, or is not supported.
        """
        model, tokenizer = loading.load(name, revision, dtype, attn_implementation, trust_remote_code)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            # transformers copies shared keys and values for every query head as soon as there is a mask, as there is in
            # verification; a CPU needs no copies: verifying 6 tokens of the embedded target takes 6.3 ms, not 7.1.
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
        return cls(model.to(device), tokenizer, name, revision)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any = None, name: str = "in-memory") -> "Target":
        """Wrap a model that is already in memory."""
        return cls(model, tokenizer, name)

    @property
    def device(self) -> torch.device:
        """Where the head lives, and the logits come from."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and the hidden states."""
        return self.head.weight.dtype

    @property
    def embedding_weight(self) -> Tensor:
        """The raw embedding rows ``[V, H]``, without a multiplier: what serving engines share with a drafter."""
        return self.model.get_input_embeddings().weight

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end a generation, from the generation config, else from the configuration."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        if ids is None:
            ids = getattr(self.config, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    def to(self, device: torch.device | str) -> "Target":
        """Move the weights."""
        self.model.to(device)
        return self

    def default_layers(self) -> tuple[int, ...]:
        """The three layers that EAGLE-3 fuses, ``(2, L//2, L-3)``: the defaults of every serving engine.

        Shallow targets, where these collide, get the nearest three distinct layers. Raises UserError below 4 layers.
        """
        layers = (2, self.num_layers // 2, self.num_layers - 3)
        if 2 < layers[1] < layers[2]:
            return layers
        if self.num_layers < 4:
            raise UserError(
                f"the target has {self.num_layers} layers: EAGLE-3 fuses three distinct inner layers and needs 4"
            )
        return (1, self.num_layers // 2, self.num_layers - 1)

    def check_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """``layers`` as a tuple. Raises UserError unless sorted, distinct and within 1..L-1.

        vLLM and TensorRT-LLM sort and deduplicate the ids, so any other order would be served wrongly.
        """
        checked = tuple(int(layer) for layer in layers)
        if list(checked) != sorted(set(checked)) or any(not 1 <= k < self.num_layers for k in checked):
            raise UserError(
                f"auxiliary layers are {list(checked)}: "
                f"expected ascending, distinct numbers from 1 to {self.num_layers - 1}"
            )
        return checked

    @torch.no_grad()
    def features(self, input_ids: Tensor, position_ids: Tensor, layers: Sequence[int]) -> Features:
        """Features of packed rows ``[B, T]``; attention stops where ``position_ids`` restart at 0."""
        # With a cache transformers would attend across documents without a word.
        return self._run(layers, input_ids=input_ids, position_ids=position_ids, use_cache=False)

    @torch.inference_mode()
    def step(
        self,
        input_ids: Tensor,
        cache: RewindableCache,
        layers: Sequence[int] = (),
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Features:
        """Features of the next tokens ``[B, n]``, whose keys and values are appended to the cache.

        Without more they follow the cached tokens one after the other. For draft trees and rows of different lengths,
        ``positions [B, n]`` tells where each token stands and ``visible [B, n, S]`` (bool) which of the S = longest
        row + n cached keys it may attend to; sliding windows are applied on top. Raises UserError where the attention
        implementation takes no masks.
        """
        if visible is None:
            return self._run(layers, input_ids=input_ids, past_key_values=cache, use_cache=True)
        assert positions is not None
        masks = attention_masks(self.config, visible, positions, cache.lengths, self.dtype)
        return self._run(
            layers,
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=masks,
            past_key_values=cache,
            use_cache=True,
        )

    def logits(self, last: Tensor) -> Tensor:
        """Logits ``[..., V]`` of hidden states after the final norm ``[..., H]``: own head, scale and soft-cap."""
        logits = self.head(last)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def new_cache(self, capacity: int) -> RewindableCache:
        """An empty cache with room for ``capacity`` tokens."""
        return RewindableCache(self.num_layers, capacity)

    def _run(self, layers: Sequence[int], **inputs: Any) -> Features:
        captured: dict[int, Tensor] = {}
        handles = []
        # Hooks live for one call: engines that wrap the model remove or bypass longer-lived ones.
        for k in layers:

            def capture(_module: nn.Module, _inputs: Any, output: Any, k: int = k) -> None:
                captured[k] = output if isinstance(output, Tensor) else output[0]

            handles.append(self.decoder.layers[k - 1].register_forward_hook(capture))
        try:
            last = self.decoder(**inputs).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        aux = torch.cat([captured[k] for k in layers], dim=-1) if layers else last[..., :0]  # [B, T, n*H]
        return Features(aux, last)

    def _logit_scale(self) -> float:
        # Cohere multiplies by logit_scale, Granite divides by logits_scaling.
        scale = getattr(self.config, "logit_scale", None)
        divisor = getattr(self.config, "logits_scaling", None)
        return float(scale if scale is not None else 1.0) / float(divisor if divisor is not None else 1.0)

    @torch.inference_mode()
    def _check_logits(self, architecture: str) -> None:
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.logits(self._run((), input_ids=ids, use_cache=False).last).float()
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 2e-2
        difference = (ours - expected).abs().max().item()
        if not difference < tolerance * max(1.0, expected.abs().max().item()):
            raise UserError(
                f"the architecture {architecture} is not supported: logits from its hidden states differ from its own "
                f"by {difference:.2g}; expected equality, so it transforms them in a way that specdraft does not know"
            )
