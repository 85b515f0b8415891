"""What layers of drafters are made of: the shape of the target's own, and transformers' projections."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from specdraft.drafters.layers import GatedMLP, Projections, RMSNorm, _Normed, shape_of


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


def kept_by(make):
    """What ``make`` gives, and of the tensors that are kept for its backward the shapes and the bytes in memory."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = make()
    return out, [(tuple(tensor.shape), tensor.untyped_storage().nbytes()) for tensor in kept.values()]


def test_an_mlp_is_llamas_and_keeps_two_tensors_of_its_inner_width():
    config = LlamaConfig(hidden_size=16, intermediate_size=48, num_attention_heads=2)
    theirs, ours = LlamaMLP(config), GatedMLP(config)
    ours.load_state_dict(theirs.state_dict())

    def found(mlp):
        """Its output, its gradients, once more too, how many inner tensors are kept, and whether the activated gate
        was in memory before backward."""
        activated = []
        mlp.act_fn = Watched(activated)
        x = torch.randn((5, 16), generator=torch.Generator().manual_seed(0)).requires_grad_()
        out, kept = kept_by(lambda: mlp(x))
        inner = sum(shape == (5, 48) and size > 0 for shape, size in kept)
        there = activated[0]() is not None
        learned = [*mlp.parameters(), x]
        gradients = [torch.autograd.grad(out.square().sum(), learned, retain_graph=again) for again in (True, False)]
        return out, gradients[0], gradients[1], inner, there

    out, gradients, again, inner, there = found(ours)
    expected, wanted, _, all_inner, held = found(theirs)
    assert torch.equal(out, expected) and all(map(torch.equal, gradients, wanted))
    assert all(map(torch.equal, again, wanted))
    assert (inner, there) == (2, False) and (all_inner, held) == (4, True)
    with torch.no_grad():
        assert torch.equal(ours(torch.ones(2, 16)), theirs(torch.ones(2, 16)))


def test_an_mlp_whose_last_matrix_does_not_learn_does_not_make_its_input_again():
    config = LlamaConfig(hidden_size=16, intermediate_size=48, num_attention_heads=2)
    mlp, activated = GatedMLP(config), []
    mlp.act_fn = Watched(activated)
    mlp.down_proj.weight.requires_grad_(False)
    mlp(torch.ones(2, 16)).sum().backward()
    assert len(activated) == 2 and mlp.gate_proj.weight.grad.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_mlps_may_be_checkpointed(reentrant):
    config = LlamaConfig(hidden_size=16, intermediate_size=48, num_attention_heads=2)
    mlps = torch.nn.Sequential(GatedMLP(config), GatedMLP(config))
    x = torch.randn((5, 16), generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = mlps(x), checkpoint(mlps, x, use_reentrant=reentrant)
    gradients = []
    for each in out:
        mlps.zero_grad()
        each.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in mlps.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_llamas_and_keeps_its_input_alone(dtype):
    theirs, ours = (kind(16, 1e-5).to(dtype) for kind in (LlamaRMSNorm, RMSNorm))
    for norm in (theirs, ours):
        norm.weight.data.copy_(torch.linspace(0.5, 2, 16))
    x, gradient = (torch.randn((2, 5, 16), generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))

    def found(norm):
        given = x.clone().requires_grad_()
        out, kept = kept_by(lambda: norm(given))
        size = sum(size for shape, size in kept if shape == (2, 5, 16))
        return out, torch.autograd.grad(out, [given, norm.weight], gradient), size

    (out, gradients, kept), (expected, wanted, all_kept) = found(ours), found(theirs)
    assert torch.equal(out, expected) and (kept, all_kept) == (160 * dtype.itemsize, 160 * (4 + dtype.itemsize))
    for mine, plain in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, plain)
    with torch.no_grad():
        assert torch.equal(ours(x), expected)


def test_the_gradients_of_a_norm_are_those_of_what_it_computes():
    norm = RMSNorm(6, 1e-5).double()
    norm.weight.data.copy_(torch.linspace(0.5, 2, 6))
    x = torch.randn((4, 6), generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: _Normed.apply(x, weight, 1e-5), (x, norm.weight))


class Watched(torch.nn.SiLU):
    """Keeps weak references to what it gave."""

    def __init__(self, given):
        super().__init__()
        self.given = given

    def forward(self, gate):
        out = super().forward(gate)
        self.given.append(weakref.ref(out))
        return out
