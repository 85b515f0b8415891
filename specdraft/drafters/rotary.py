"""Rotary angles of a drafter, by transformers' own functions."""

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class RotaryTable:
    """Cos and sin of all positions up to the largest that was asked for; for angles that do not depend on the length of
    the text. Not a module: ranks extend their tables in different steps, and under ZeRO-3 a module that one rank calls
    and another does not makes both wait for ever."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        self._frequencies: tuple[Tensor, float] | None = None  # fp32 [d / 2] on the CPU, and the scale of cos and sin
        self._table: tuple[Tensor, Tensor] | None = None

    def __call__(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin ``[>= length, d]``, computed in fp32, in the dtype and on the device of ``like``."""
        table = self._table
        kind = (like.dtype, like.device)
        if table is None or len(table[0]) < length or (table[0].dtype, table[0].device) != kind:
            limit = self.config.max_position_embeddings
            self._table = table = self._make(max(length, min(2 * length, limit)), like)
        return table

    def _make(self, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # Decoding runs in inference mode, the tensors of which a later training step could not use.
        with torch.inference_mode(False), torch.no_grad():
            if self._frequencies is None:
                kind = self.config.rope_parameters["rope_type"]
                initialize = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
                with torch.device("cpu"):
                    self._frequencies = initialize(self.config)
            frequencies, scale = self._frequencies
            positions = torch.arange(size, device=like.device, dtype=torch.float32)
            angles = positions[:, None] * frequencies.to(like.device)  # [size, d / 2]
            angles = torch.cat([angles, angles], dim=-1)  # [size, d]
            return (angles.cos() * scale).to(like.dtype), (angles.sin() * scale).to(like.dtype)
