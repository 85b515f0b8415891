"""MTP layers of targets' own layouts: GLM-4-MoE's whole, beside transformers' own; those of others refused."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

from specdraft.drafters.checkpoint import about_target, load_drafter, save_drafter
from specdraft.drafters.eagle import MTP
from specdraft.drafters.eagle.mtp_layouts import LAYOUTS
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.drafters.alone import Alone
from tests.fakes import tiny_llama

LAYERS = 3


@pytest.fixture
def glm(tmp_path, monkeypatch):
    """glm(**settings) -> a target whose files hold an MTP layer, and that layer's tensors."""
    # By the numbers of the published models' layers transformers knows what is one.
    monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}.*"])

    def write(**settings):
        torch.manual_seed(0)
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2}
        sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
        config = Glm4MoeConfig(**sizes, **heads, **experts, topk_group=1, routed_scaling_factor=1.5, **settings)
        model = Glm4MoeForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        source, folder = Target.from_model(model), tmp_path / "glm"
        own = MTP.for_target(source, start="scratch").published(LAYERS)
        own = {name: 0.5 * torch.randn_like(tensor) + name.endswith("norm.weight") for name, tensor in own.items()}
        model.save_pretrained(folder)
        weights = folder / "model.safetensors"
        save_file(load_file(weights) | own, weights, metadata={"format": "pt"})
        return Target.from_model(Glm4MoeForCausalLM.from_pretrained(folder), name=str(folder)), own

    return write


@pytest.mark.parametrize("options", [{}, {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 1.0}])
def test_glms_layer_says_what_transformers_own_says(glm, options):
    target, _ = glm(**options)
    head = MTP.for_target(target)
    ids = torch.randint(1, 97, (1, 12))
    features = target.features(ids, torch.arange(12)[None])
    # Ours counts positions from 0 on and has no embedding at the first of them: so must the reference, from one later.
    theirs = MtpModel.from_pretrained(target.model)
    embedded = target.embedding_weight[ids[:, 1:]].clone()
    embedded[:, 0] = 0
    layer = theirs.layers[0]
    positions = torch.arange(11)[None]
    angles = theirs.rotary_emb(embedded, positions)
    mask = torch.full((1, 1, 11, 11), -torch.inf).triu(1)
    normed = layer(embedded, features.last[:, :-1], angles, mask, positions, None)
    request = Alone(head, int(ids[0, 0]))
    request.advance(ids[0, 1:], features.take(positions))
    torch.testing.assert_close(request.along([])[-1:], target.logits(normed[0, -1:]), rtol=1e-4, atol=1e-4)


def test_later_steps_read_what_goes_into_the_last_norm(glm):
    target, _ = glm()
    head, seen = MTP.for_target(target), []
    head.final_layernorm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    head.hidden_layernorm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    ids = torch.randint(1, 97, (1, 8))
    request = Alone(head, int(ids[0, 0]))
    request.advance(ids[0, 1:], target.features(ids, torch.arange(8)[None]).take(torch.arange(7)[None]))
    request.along([5])
    assert torch.equal(seen[1][-1], seen[2][-1])  # the first output, before its norm, and what the second step reads


def test_it_is_tuned_saved_and_written_back(glm, tmp_path):
    target, own = glm()
    head = MTP.for_target(target).train()
    ids, learned = torch.randint(1, 97, (2, 16)), torch.ones(2, 16, dtype=torch.bool)
    batch = Batch(ids, torch.arange(16).expand(2, -1), torch.zeros(2, 16, dtype=torch.int64), learned)
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        loss = head.training_loss(batch, target.features(ids, batch.position_ids), target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    checkpoint = save_drafter(head, tmp_path / "drafter", target.identity, {"target": about_target(target)})
    again, _ = load_drafter(checkpoint)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
    written = load_file(export(checkpoint, VLLM(dtype="float32"), tmp_path / "served") / "model.safetensors")
    assert written.keys() == own.keys() | {"model.embed_tokens.weight", "lm_head.weight"}
    moved = [name for name in own if not torch.equal(own[name], written[name])]
    assert len(moved) == len(own) - 1  # but for the router's correction, which is not trained


def test_layers_of_other_layouts_are_refused(tmp_path):
    target = Target.from_model(tiny_llama())
    for name, title in (("model.layers.4.eh_proj.weight", "DeepSeek-V3"), ("mtp.fc.weight", "Qwen3-Next")):
        folder = tmp_path / title
        folder.mkdir()
        save_file({name: torch.ones(1)}, folder / "model.safetensors")
        told = Target.from_model(target.model, name=str(folder))
        told.config.num_nextn_predict_layers = 1
        said = f"in the layout of {title} ({name}): expected that of MiMo and Glm4Moe; model.drafter.start=scratch"
        with pytest.raises(UserError, match=re.escape(said)):
            MTP.for_target(told)
        assert MTP.for_target(told, start="scratch").layout is LAYOUTS["mimo"]
    told.config.num_nextn_predict_layers = 0
    assert MTP.for_target(told).layout is LAYOUTS["mimo"]
    with pytest.raises(UserError, match="layout is 'glm': expected one of mimo, glm4_moe"):
        MTP(**MTP.for_target(told).config() | {"layout": "glm"})
