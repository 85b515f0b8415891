"""The decoder layer beside transformers' Qwen3 layer, which it is where there is no context."""

import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from specdraft.drafters.dflash.layer import Angles, BlockLayer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


def test_a_block_without_context_is_a_layer_of_qwen3_that_sees_both_ways():
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_hidden_layers=1, attn_implementation="sdpa")
    theirs, ours = Qwen3DecoderLayer(config, 0).double(), BlockLayer(LlamaConfig(**SIZES)).double()
    for parameter in theirs.parameters():
        parameter.data.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3)
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(1, 6, 32).double(), torch.arange(10, 16)[None]
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions)
    everything = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    expected = theirs(x, attention_mask=everything, position_ids=positions, position_embeddings=(cos, sin))

    def attention(query, key, value):
        heads = (each.transpose(0, 1)[None] for each in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)[0].transpose(0, 1)

    found = ours(x[0], Angles(cos[0], sin[0]), attention)
    torch.testing.assert_close(found, expected[0] if expected.ndim == 3 else expected, rtol=1e-6, atol=1e-6)


def test_the_context_is_projected_by_the_matrices_of_the_slots():
    layer = BlockLayer(LlamaConfig(**SIZES)).double()
    context = torch.randn(5, 32).double()
    angles = Angles(torch.ones(5, 8).double(), torch.zeros(5, 8).double())
    key, value = layer.self_attn.key_value(context, *angles)
    attention = layer.self_attn
    torch.testing.assert_close(value.flatten(1), attention.v_proj(context))
    torch.testing.assert_close(key, attention.k_norm(attention.k_proj(context).view(5, 2, 8)))
