"""DFlash and DSpark drafters come back from both layouts bit by bit, and what ours does not compute is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdraft.decoding.passes import Texts
from specdraft.drafters.dflash import DFlash, DSpark
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.speculators import Speculators
from specdraft.export.vllm import VLLM

KINDS = {"dflash": DFlash, "dspark": DSpark}
OPTIONS = {"layers": [1, 3, 6], "num_layers": 2, "block_size": 4}
both = pytest.mark.parametrize("family", KINDS)


@pytest.fixture
def published(make_drafter, save, tmp_path):
    """published(family, engine, **options) -> (drafter, its directory)."""

    def make(family, engine, dtype="float32", **options):
        drafter = make_drafter(family, mask_token=7, **OPTIONS | options)
        return drafter, export(save(drafter), engine(dtype=dtype), tmp_path / "public")

    return make


def changed(directory, change):
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    change(config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


def block_logits(drafter, target):
    """Of a block behind a text, by the real decoding."""
    ids = torch.arange(3, 15)[None]
    features = target.features(ids[:, :-1], torch.arange(11)[None], drafter.layers)
    drafting = drafter.drafting(1, 32)
    drafting.begin(0, 3)
    texts = Texts(torch.ones(1, dtype=torch.int64), 1)
    drafting.advance(texts, ids[:, 1:], torch.tensor([11]), features)
    return drafting.first(Texts(torch.tensor([12]), 12))


@both
@pytest.mark.parametrize("engine", [VLLM, Speculators])
@pytest.mark.parametrize("options", [{}, {"draft_vocabulary": None}], ids=["pruned", "whole"])
@torch.inference_mode()
def test_it_comes_back_bit_by_bit_and_says_the_same(published, save, target, tmp_path, family, engine, options):
    drafter, directory = published(family, engine, **options)
    imported = import_head(directory, target)
    assert type(imported) is KINDS[family] and imported.config() == drafter.config()
    state = imported.state_dict()
    assert all(torch.equal(state[name], value) for name, value in drafter.state_dict().items())
    assert torch.equal(block_logits(imported, target), block_logits(drafter, target))
    again = export(save(imported), engine(dtype="float32"), tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (directory / file).read_bytes(), file


def test_a_causal_block_and_heads_left_out(published, target):
    drafter, directory = published("dflash", VLLM, causal=True)
    assert import_head(directory, target).causal
    drafter, directory = published("dspark", VLLM, confidence_head=False)
    assert import_head(directory, target).config() == drafter.config()


def test_layers_may_be_told(published, target):
    _, directory = published("dflash", VLLM)
    assert import_head(directory, target, [2, 4, 5]).layers == (2, 4, 5)


def setting(**keys):
    return lambda config, tensors: config.update(keys)


def of_layer(**keys):
    return lambda config, tensors: config["transformer_layer_config"].update(keys)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("dflash", setting(sample_from_anchor=True), "sample_from_anchor=true"),
        ("dspark", setting(sample_from_anchor=False), "sample_from_anchor=false"),
        ("dspark", setting(markov_head_type="gated"), "markov_head_type=gated"),
        ("dspark", setting(confidence_head_with_markov=False), "confidence_head_with_markov=False"),
        ("dspark", setting(markov_rank=None), "markov_rank=None: expected a number"),
        ("dflash", setting(mask_token_id=None), "mask_token=None: expected a number"),
        ("dflash", setting(aux_hidden_state_layer_ids=None), "do not say which layers"),
        ("dflash", setting(target_hidden_size=64), "target_hidden_size=64"),
        ("dflash", of_layer(model_type="llama"), "model_type=llama"),
        ("dflash", of_layer(attention_bias=True), "attention_bias=True"),
        ("dflash", of_layer(layer_types=["full_attention", "sliding_attention"]), "layers that see a window"),
        ("dflash", of_layer(num_hidden_layers=3), r"missing: layers\.2"),
        ("dflash", lambda config, tensors: tensors.pop("d2t"), "lacks d2t"),
        ("dflash", lambda config, tensors: tensors.update({"embed_tokens.weight": torch.ones(97, 32)}), "an embedding"),
        ("dflash", setting(speculators_model_type="mtp"), "'mtp', a Qwen3 layer with norms of queries and keys"),
        ("dflash", setting(speculators_model_type=["dflash"]), "expected eagle3, peagle, dflash, dspark"),
    ],
)
def test_what_ours_does_not_compute_is_refused_by_name(published, target, family, change, said):
    _, directory = published(family, Speculators)
    changed(directory, change)
    with pytest.raises(UserError, match=said):
        import_head(directory, target)


def test_a_window_of_the_plain_layout_is_refused(published, target):
    _, directory = published("dflash", VLLM)
    changed(directory, lambda config, tensors: config["dflash_config"].update(use_swa=True))
    with pytest.raises(UserError, match="layers that see a window"):
        import_head(directory, target)


def test_the_targets_own_embedding_in_the_file_is_shared(published, target):
    drafter, directory = published("dflash", Speculators)
    own = target.embedding_weight.detach().clone()
    changed(directory, lambda config, tensors: tensors.update({"embed_tokens.weight": own}))
    assert import_head(directory, target).config() == drafter.config()
