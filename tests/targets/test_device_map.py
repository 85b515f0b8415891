"""A target spread over the host's memory and the disk is the same target; where each layer goes is by its size."""

import pytest
import torch
from accelerate import init_empty_weights
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.device_map import spread

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    eos_token_id=1,
    initializer_range=0.3,
)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    train_tokenizer(["def add(a, b):\n    return a + b\n"] * 3, 300, 128).save_pretrained(tmp_path)
    return tmp_path


def sizes() -> tuple[int, int]:
    """Bytes of a layer, and of all that is no layer."""
    model = LlamaForCausalLM(CONFIG)
    layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    return layer, sum(p.numel() * 4 for p in model.parameters()) - 6 * layer


def test_layers_on_disk_give_the_same_features_tokens_and_identity(folder):
    layer, outside = sizes()
    whole = Target.load(str(folder), dtype="float32", device="cpu", packed=False)
    part = Target.load(str(folder), dtype="float32", placement="device_map", max_memory={"cpu": outside + 2 * layer})
    on_disk = [name for name, weight in part.model.named_parameters() if weight.is_meta]
    assert {name.split(".")[2] for name in on_disk} == {"2", "3", "4", "5"}
    assert part.identity == whole.identity
    assert part.to("cpu") is part and part.device.type == "cpu"
    ids = torch.arange(3, 23).view(2, 10)
    positions = torch.arange(5).repeat(2, 2)
    with torch.inference_mode():
        ours, theirs = (each.features(ids, positions, (1, 3, 5)) for each in (part, whole))
        assert torch.equal(ours.aux, theirs.aux) and torch.equal(ours.last, theirs.last)
        assert torch.equal(part.logits(ours.last), whole.logits(theirs.last))
    texts = [Decoder(each, PromptLookup(), 3).generate([5, 6, 7, 5, 6], 12).tokens for each in (part, whole)]
    assert texts[0] == texts[1]


def test_layers_fill_one_place_after_the_other():
    layer, outside = sizes()
    with init_empty_weights():
        model = LlamaForCausalLM(CONFIG)
    places = spread(model, {0: outside + 2 * layer, 1: 3 * layer - 1, "cpu": layer})
    assert [places[f"model.layers.{number}"] for number in range(6)] == [0, 0, 1, 1, "cpu", "disk"]
    assert {name: place for name, place in places.items() if "layers" not in name} == {
        "model.embed_tokens": 0,
        "model.norm": 0,
        "model.rotary_emb": 0,
        "lm_head": 0,
    }


def test_a_first_place_without_room_for_the_head_is_refused():
    with init_empty_weights():
        model = LlamaForCausalLM(CONFIG)
    with pytest.raises(UserError, match=r"embedding and head of the target take .* raise target.max_memory"):
        spread(model, {0: 1000, "cpu": 10**9})
