"""A tiny random target in fp64, so that equalities are equalities."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.targets import Target
from specdraft.targets.batch import Batch


@pytest.fixture(scope="session")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        eos_token_id=None,
        initializer_range=0.3,  # far from uniform, so that mistakes show
    )
    return Target.from_model(LlamaForCausalLM(config).double())


@pytest.fixture
def packed() -> Batch:
    """Two rows: documents of 9 + 14 tokens, and of 20 tokens with padding; answers behind prompts."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 97, (2, 23), generator=g)
    documents = torch.tensor([[0] * 9 + [1] * 14, [0] * 20 + [-1] * 3])
    positions = torch.tensor([[*range(9), *range(14)], [*range(20), *range(3)]])
    mask = torch.tensor([[0] * 3 + [1] * 6 + [0] * 5 + [1] * 9, [0] * 4 + [1] * 6 + [0] * 3 + [1] * 7 + [0] * 3])
    return Batch(tokens, positions, documents, mask.bool())
