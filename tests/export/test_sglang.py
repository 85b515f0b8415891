"""SGLang's own EAGLE-3 class takes an export: its constructor and loader run, over plain layers instead of its kernels.

SGLang needs no GPU to be installed, but its layers need one to be imported. ``make parity-sglang`` installs its files
alone, without what they depend on, and runs this.
"""

import importlib.util
import json
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig

from specdraft.export import export
from specdraft.export.sglang import SGLang

FOUND = importlib.util.find_spec("sglang")  # finds without importing
pytestmark = pytest.mark.skipif(FOUND is None, reason="sglang is not installed: make parity-sglang runs this")


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), torch.nan))


class Matrix(nn.Module):
    """Rows of several matrices one below the other; ``parts`` names them and counts their rows."""

    def __init__(self, width, parts):
        super().__init__()
        self.weight = nn.Parameter(torch.full((sum(parts.values()), width), torch.nan))
        ends = dict(zip(parts, torch.tensor(list(parts.values())).cumsum(0).tolist(), strict=True))

        def load(parameter, tensor, shard=None):
            rows = slice(ends[shard] - parts[shard], ends[shard])
            assert tensor.shape == parameter[rows].shape
            parameter.data[rows] = tensor

        self.weight.weight_loader = load


class QKV(Matrix):
    def __init__(self, width, head_dim, heads, kv_heads, **_):
        super().__init__(width, {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim})


class MLP(nn.Module):
    def __init__(self, width, inner, *_):
        super().__init__()
        self.gate_up_proj, self.down_proj = Matrix(width, {0: inner, 1: inner}), Matrix(inner, {None: width})


class Embedding(nn.Module):
    def __init__(self, rows, width, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, width), torch.nan))


class Layer(nn.Module):
    def __init__(self, config, layer_id, **_):
        super().__init__()
        self.hidden_size = h = config.hidden_size
        self.self_attn = nn.Module()
        self.self_attn.head_dim, self.self_attn.total_num_heads = config.head_dim, config.num_attention_heads
        self.self_attn.total_num_kv_heads = config.num_key_value_heads
        self.self_attn.o_proj = Matrix(config.num_attention_heads * config.head_dim, {None: h})
        self.input_layernorm, self.post_attention_layernorm = Norm(h, 0.0), Norm(h, 0.0)


class Nothing:
    """A context, a logits processor, a mark in a signature: what the loader passes by."""

    def __init__(self, *_, **__): ...

    def __enter__(self): ...

    def __exit__(self, *_): ...

    SINGLE_GROUP = None


def copy_all(parameter, tensor):
    assert tensor.shape == parameter.shape
    parameter.data.copy_(tensor)


PLAIN = {
    "RMSNorm": Norm,
    "QKVParallelLinear": QKV,
    "ParallelLMHead": Embedding,
    "VocabParallelEmbedding": Embedding,
    "LlamaDecoderLayer": Layer,
    "LlamaForCausalLM": nn.Module,
    "LlamaMLP": MLP,
    "default_weight_loader": copy_all,
    "add_prefix": lambda name, prefix: name,
    "get_parallel": lambda: SimpleNamespace(pp_group=None),
    "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
}


class Plain(ModuleType):
    __path__: tuple[str, ...] = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return PLAIN.get(name, Nothing)


class PlainImports(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "sglang" else None

    def create_module(self, spec):
        return Plain(spec.name)

    def exec_module(self, module): ...


@pytest.fixture
def eagle3(monkeypatch):
    """SGLang's LlamaForCausalLMEagle3."""
    monkeypatch.setattr(sys, "meta_path", [PlainImports(), *sys.meta_path])
    source = Path(FOUND.submodule_search_locations[0]) / "srt/models/llama_eagle3.py"
    spec = importlib.util.spec_from_file_location("sglang_llama_eagle3", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    return module.LlamaForCausalLMEagle3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vocabulary": None},
        {"fc_norm": True, "norm_output": True},
        {"layers": [1, 6]},
        {"norm_before_fc": True, "num_layers": 2},
    ],
)
def test_every_parameter_is_loaded(eagle3, make_checkpoint, options):
    head, checkpoint = make_checkpoint(**options)
    directory = export(checkpoint, SGLang())
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    model = eagle3(LlamaConfig(**config))
    model.model.fc.weight.data.fill_(torch.nan)
    model.load_weights(tensors.items())

    unset = {name for name, parameter in model.named_parameters() if parameter.isnan().any()}
    assert unset == {"model.embed_tokens.weight"}  # that one is the target's
    for further, ours in zip(model.model.layers[1:], head.later, strict=True):
        assert torch.equal(further.hidden_norm.weight, ours.input_layernorm.weight)  # the one that SGLang reads
    assert (model.model.input_norm is not None) is bool(options.get("norm_before_fc"))
    layer = model.model.layers[0]
    attention = [tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(attention))
    assert torch.equal(layer.hidden_norm.weight, head.midlayer.hidden_norm.weight)
    assert torch.equal(model.lm_head.weight, head.lm_head.weight)
    assert model.model.norm_output is head.norm_output and (model.model.fc_norm is not None) is bool(
        options.get("fc_norm")
    )
    ids = model.get_hot_token_id()
    assert ids is None if "vocabulary" in options else torch.equal(ids, head.draft_ids)
