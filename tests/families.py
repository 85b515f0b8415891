"""Tiny random models of every family whose head, norm, window or experts differ; fp64, so that equal means equal."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

V, LENGTH, WINDOW = 61, 24, 4
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # far from uniform, so that mistakes show
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "experts_implementation": "eager",  # the grouped one knows no fp64
}


@dataclass(frozen=True)
class Family:
    """model_type: transformers' name. options: what is set beside ``SIZES``."""

    model_type: str
    options: dict[str, Any]

    @property
    def windowed(self) -> bool:
        return bool(self.options.get("sliding_window"))

    def build(self, **options: Any) -> Any:
        config = transformers.AutoConfig.for_model(self.model_type, **{**SIZES, **self.options, **options})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():  # norms begin as ones, or as zeros that stand for ones: which it is must show
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
        return model


FAMILIES = {
    "llama": Family("llama", {}),
    "qwen3": Family("qwen3", {}),
    "mistral": Family("mistral", {"sliding_window": WINDOW}),
    "gemma3": Family(
        "gemma3_text",
        {"sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL, "final_logit_softcapping": 3.0},
    ),
    "gemma2": Family(
        "gemma2",
        {
            "sliding_window": WINDOW,
            "layer_types": SLIDING_AND_FULL,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,
            "attn_implementation": "eager",  # the only one that caps attention
        },
    ),
    "qwen3-moe": Family("qwen3_moe", EXPERTS),
    "mixtral": Family("mixtral", EXPERTS | {"sliding_window": WINDOW}),
    "gpt-oss": Family(
        "gpt_oss",
        EXPERTS
        | {
            "sliding_window": WINDOW,
            "layer_types": SLIDING_AND_FULL,
            "attn_implementation": "eager",  # the only one that knows attention sinks
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "granite": Family("granite", {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "cohere": Family("cohere", {"logit_scale": 0.0625, "use_qk_norm": True}),
}
