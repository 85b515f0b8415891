"""What layers of drafters are made of: the shape of the target's own, and transformers' projections."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from specdraft.drafters.layers import GatedMLP, Projections, shape_of


def test_it_has_the_shape_of_one_layer_of_its_target():
    def shape(intermediate_size=None, **config):
        given = {"num_attention_heads": 4, "intermediate_size": 96, "rope_parameters": {"rope_theta": 500.0}} | config
        target = SimpleNamespace(config=SimpleNamespace(**given), hidden_size=64, vocab_size=100, max_length=50)
        return shape_of(target, intermediate_size)

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 50}
    derived = {"intermediate_size": 96, "num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6}
    assert shape() == sizes | derived | {"rope_parameters": {"rope_theta": 500.0}}
    own = {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5}
    assert shape(32, **own).items() >= (own | {"intermediate_size": 32}).items()
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    of_layers = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert shape(rope_parameters=of_layers)["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 1e6}


@pytest.mark.parametrize("qk_norm", [True, False])
def test_queries_keys_and_values_are_those_of_qwen3(qk_norm):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_hidden_layers=1)
    theirs, ours = Qwen3Attention(config, 0).double(), Projections(LlamaConfig(**sizes), 32, qk_norm).double()
    for parameter in theirs.parameters():
        parameter.data.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3)
    ours.load_state_dict(theirs.state_dict(), strict=qk_norm)
    x, positions = torch.randn(1, 6, 32).double(), torch.arange(10, 16)[None]
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions)
    plain = [part(x).unflatten(-1, (-1, 8)) for part in (theirs.q_proj, theirs.k_proj)]
    if qk_norm:
        plain = [theirs.q_norm(plain[0]), theirs.k_norm(plain[1])]
    expected = apply_rotary_pos_emb(*(each.transpose(1, 2) for each in plain), cos, sin)
    key, value = ours.key_value(x[0], cos[0], sin[0])
    found = ours.query(x[0], cos[0], sin[0]), key
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(value.flatten(1), theirs.v_proj(x[0]))


def test_an_mlp_is_llamas_and_makes_the_activated_gate_again():
    config = LlamaConfig(hidden_size=16, intermediate_size=48, num_attention_heads=2)
    theirs, ours = LlamaMLP(config), GatedMLP(config)
    ours.load_state_dict(theirs.state_dict())

    def found(mlp):
        """Its output, gradients, and whether the activated gate was in memory before backward."""
        activated = []
        mlp.act_fn = Watched(activated)
        x = torch.randn((5, 16), generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = mlp(x)
        kept = activated[0]() is not None
        return out, torch.autograd.grad(out.square().sum(), [*mlp.parameters(), x]), kept, len(activated)

    (out, gradients, kept, calls), (expected, wanted, held, once) = found(ours), found(theirs)
    assert torch.equal(out, expected) and all(map(torch.equal, gradients, wanted))
    assert (kept, calls) == (False, 2) and (held, once) == (True, 1)
    with torch.no_grad():
        assert torch.equal(ours(torch.ones(2, 16)), theirs(torch.ones(2, 16)))


class Watched(torch.nn.SiLU):
    """Keeps weak references to what it gave."""

    def __init__(self, given):
        super().__init__()
        self.given = given

    def forward(self, gate):
        out = super().forward(gate)
        self.given.append(weakref.ref(out))
        return out
