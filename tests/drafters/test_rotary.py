"""The rotary table is transformers' own embedding, and a plain object that no engine hooks into."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdraft.drafters.rotary import RotaryTable

KINDS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}


def config_of(kind: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters=KINDS[kind],
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_equals_transformers_embedding(kind, dtype):
    like, positions = torch.zeros((), dtype=dtype), torch.arange(200)[None]
    ours = RotaryTable(config_of(kind))(200, like)
    theirs = LlamaRotaryEmbedding(config_of(kind))(like, positions)
    assert all(torch.equal(mine[:200], their[0]) for mine, their in zip(ours, theirs, strict=True))


def test_it_grows_and_follows_the_dtype():
    table = RotaryTable(config_of("default"))
    short = table(10, torch.zeros(()))
    assert len(short[0]) == 20 and table(20, torch.zeros(())) is short
    grown = table(200, torch.zeros(()))
    assert len(grown[0]) == 256 and torch.equal(grown[0][:20], short[0])
    assert len(table(300, torch.zeros(()))[0]) == 300
    assert table(10, torch.zeros((), dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_a_table_from_inference_mode_can_be_trained_with():
    table = RotaryTable(config_of("default"))
    with torch.inference_mode():
        table(10, torch.zeros(()))
    weight = torch.ones(16, requires_grad=True)
    (weight * table(10, weight)[0][:10]).sum().backward()
    assert weight.grad is not None


def test_it_can_be_built_where_tensors_have_no_memory():
    with torch.device("meta"):
        table = RotaryTable(config_of("default"))
        assert table(10, torch.zeros(()))[0].is_meta
    torch.testing.assert_close(table(10, torch.zeros(()))[0][0], torch.ones(16))
