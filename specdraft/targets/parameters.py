"""How many parameters a target has, and how many of them a token passes through."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

_EXPERT = re.compile(r"\bexperts\b")


@dataclass(frozen=True)
class Sizes:
    """Parameters of a target: all, those that a token passes through, those of its layers together, and those of the
    largest of them; attention's width A times its layers."""

    total: int
    active: int
    layers: int
    largest: int
    attention: int


def target_sizes(model: nn.Module, config: Any) -> Sizes:
    """Sizes of a target. Embedding rows cost no arithmetic; of a mixture only the chosen experts do."""
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    chosen, experts = getattr(config, "num_experts_per_tok", None), next(filter(None, counts), None)
    share = chosen / experts if chosen and experts else 1.0
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    total = sum(parameter.numel() for parameter in model.parameters())
    tied = model.get_output_embeddings().weight is embedding  # type: ignore[operator]
    active = sum(p.numel() * (share if _EXPERT.search(name) else 1.0) for name, p in model.named_parameters())
    active -= 0 if tied else embedding.numel()  # tied: the same matrix is the LM head, which does work
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    decoder = model.get_decoder()  # type: ignore[operator]
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder.layers]
    return Sizes(total, int(active), sum(layers), max(layers), heads * head_dim * config.num_hidden_layers)
