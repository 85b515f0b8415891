"""Multi-token prediction: MiMo's layer, tuned where the target has one and trained where it has none."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from specdraft.drafters.eagle import MTP
from specdraft.drafters.eagle.mtp_layouts import LAYOUTS
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.drafters.alone import Alone
from tests.families import FAMILIES

ARCHITECTURE, OWN = LAYOUTS["mimo"].architecture, LAYOUTS["mimo"].prefix


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, initializer_range=0.3, attn_implementation="sdpa"))


@pytest.fixture
def labelled(tmp_path):
    """labelled(layer=True) -> the directory of a target that calls itself MiMo, with a layer of its own or without."""

    def write(layer: bool = True, name: str = "mimo"):
        folder, source = tmp_path / name, Target.from_model(model())
        source.model.save_pretrained(folder)
        torch.manual_seed(7)
        state = MTP.for_target(source).state_dict() if layer else {}
        weights, config = folder / "model.safetensors", folder / "config.json"
        own = {OWN + key.removeprefix("layer."): torch.randn_like(tensor) for key, tensor in state.items()}
        save_file(load_file(weights) | own, weights, metadata={"format": "pt"})
        says = json.loads(config.read_text()) | {"architectures": [ARCHITECTURE]}
        config.write_text(json.dumps(says))
        return Target.from_model(Qwen2ForCausalLM.from_pretrained(folder), name=str(folder))

    return write


def reference(head: MTP, target: Target, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What the layer gives of a text ``ids [T]`` and hidden states ``[T, H]``, out of transformers' Qwen2 layer,
    ``[T - 1, H]``: position r reads hidden state r and token r + 1."""
    config = target.config
    layer = Qwen2DecoderLayer(config, 0).double()
    layer.load_state_dict(head.layer.state_dict())
    embedded = target.embedding_weight[ids[1:]].double()
    embedded[0] = 0  # of position 0
    norm = [nn.functional.rms_norm(hidden[:-1], (32,), head.hidden_layernorm.weight, config.rms_norm_eps)]
    norm += [nn.functional.rms_norm(embedded, (32,), head.token_layernorm.weight, config.rms_norm_eps)]
    read = (torch.cat(norm, dim=-1) @ head.input_proj.weight.T)[None]
    positions = torch.arange(read.shape[1])[None]
    angles = Qwen2RotaryEmbedding(config)(read, positions)
    output = layer(read, position_embeddings=angles, position_ids=positions, attention_mask=None)
    output = output[0] if isinstance(output, tuple) else output
    return nn.functional.rms_norm(output[0], (32,), head.final_layernorm.weight, config.rms_norm_eps)


def randomized(head: MTP) -> MTP:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return head.double()


@pytest.mark.parametrize("before_norm", [False, True])
def test_it_computes_mimos_layer_and_reads_its_own_output(before_norm):
    target = Target.from_model(model().double())
    head = randomized(MTP.for_target(target, before_norm=before_norm))
    ids = torch.randint(0, 97, (12,))
    features = target.features(ids[None], torch.arange(12)[None], head.layers)
    hidden = (features.aux if before_norm else features.last)[0]
    normed = target.norm(hidden) if before_norm else hidden
    torch.testing.assert_close(target.logits(normed), target.model(ids[None]).logits[0])  # it is that hidden state
    first = reference(head, target, ids, hidden)
    drafted = torch.tensor([5])
    later = torch.cat([hidden[:-1], first[-1:], first[-1:]])  # the last one is not read
    second = reference(head, target, torch.cat([ids, drafted]), later)
    request = Alone(head, int(ids[0]))
    request.advance(ids[1:], features.take(torch.arange(11)[None]))
    expected = target.logits(torch.cat([first[-1:], second[-1:]]))
    torch.testing.assert_close(request.along([5]), expected, rtol=1e-5, atol=1e-5)  # norms are in fp32


def test_a_target_that_has_a_layer_gives_it(labelled):
    target = labelled()
    head = MTP.for_target(target)
    written = load_file(f"{target.identity.name}/model.safetensors")
    assert head.layers == (4,)  # MiMo is served with the hidden state before the final norm
    assert all(torch.equal(each, written[OWN + key.removeprefix("layer.")]) for key, each in head.state_dict().items())
    assert MTP.for_target(target, start="scratch").layers == (4,)
    assert MTP.for_target(target, before_norm=False).layers == ()


def test_starts_that_are_not_there(labelled):
    with pytest.raises(UserError, match=r"has no MTP layer of its own: model.mtp_layers.0.* set model.drafter.start"):
        MTP.for_target(labelled(layer=False))
    with pytest.raises(UserError, match=r"model.drafter.start is 'layer': expected one of auto, own, scratch"):
        MTP.for_target(Target.from_model(model()), start="layer")


def test_heads_share_the_width():
    target = Target.from_model(model())
    shape = MTP.for_target(target).config()
    assert (shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]) == (4, 2, 8)
    with pytest.raises(UserError, match="4 heads of 16 are not the width 32: expected so"):
        MTP(**shape | {"head_dim": 16})
    with pytest.raises(UserError, match=r"layers is \[1, 4\]: expected the target's last one, or none"):
        MTP(**shape | {"layers": [1, 4]})


def test_heads_that_could_not_be_rotated_are_refused():
    shape = {"hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 97, "head_dim": 8}
    config = LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=2)
    with pytest.raises(UserError, match="the target is 40 wide and has 8 heads, whose shares cannot be rotated"):
        MTP.for_target(Target.from_model(LlamaForCausalLM(config)))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "cohere"])
def test_a_target_by_whose_configuration_engines_cannot_build_a_layer_is_refused(name):
    with pytest.raises(UserError, match="has no hidden_act silu or no rms_norm_eps"):
        MTP.for_target(Target.from_model(FAMILIES[name].build().float()))


def test_a_layer_of_another_shape_is_refused(labelled):
    target = labelled()
    weights = f"{target.identity.name}/model.safetensors"
    tensors = load_file(weights)
    tensors[OWN + "input_proj.weight"] = tensors[OWN + "input_proj.weight"][:, :32].contiguous()
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"is of another shape .*input_proj.weight.*: expected that of"):
        MTP.for_target(target)


def test_it_has_the_whole_vocabulary():
    with pytest.raises(UserError, match=r"MTP, with the target's head, expects all; set model.draft_vocab_size=null"):
        MTP.for_target(Target.from_model(model()), torch.arange(20))
