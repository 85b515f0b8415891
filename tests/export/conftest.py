"""A random target and a checkpoint of a head for it. Both random, so that every mistake moves the numbers."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.eagle3 import Eagle3
from specdraft.targets import Target

ABOUT = {"dtype": "float32", "num_hidden_layers": 7, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
VOCABULARY = torch.arange(1, 97, 3)


@pytest.fixture(scope="session")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_theta=5000.0,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return Target.from_model(LlamaForCausalLM(config))


@pytest.fixture
def make_checkpoint(target, tmp_path):
    """make_checkpoint(vocabulary, about=changes to what it says of its target, **options) -> (head, directory)."""

    def make(vocabulary=VOCABULARY, about: dict[str, Any] | None = None, **options: Any):
        torch.manual_seed(1)
        head = Eagle3.for_target(target, vocabulary, **options)
        for name, parameter in head.named_parameters():
            parameter.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
        extra = {"decoding": {"num_draft_tokens": 4}, "target": ABOUT | (about or {})}
        return head.eval(), save_drafter(head, tmp_path / "run" / "drafter", target.identity, extra)

    return make


@pytest.fixture
def identity(target) -> dict[str, Any]:
    return asdict(target.identity)
