"""Public EAGLE-3 heads, in every layout they are published in, and what of them is refused by its name."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdraft.drafters.eagle import PEagle
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.vllm import VLLM


@pytest.fixture
def published(make_checkpoint):
    """published(**options) -> (head, the directory that our exporter writes): vLLM's plain layout."""

    def make(dtype="float32", **options):
        head, checkpoint = make_checkpoint(**options)
        return head, export(checkpoint, VLLM(dtype=dtype), checkpoint.parent / "public")

    return make


@pytest.fixture
def rewritten(published):
    """rewritten(change, **options): a published head after ``change(config, tensors)`` -> (head, directory)."""

    def make(change, **options):
        head, directory = published(**options)
        config, tensors = (
            json.loads((directory / "config.json").read_text()),
            load_file(directory / "model.safetensors"),
        )
        config, tensors = change(config, tensors) or (config, tensors)
        (directory / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
        return head, directory

    return make


def same(head, imported):
    assert imported.config() | {"ttt_steps": 0} == head.config() | {"ttt_steps": 0}
    state = imported.state_dict()
    assert state.keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(state[name], tensor), name
        assert state[name].dtype == tensor.dtype, name


SPECULATORS = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "sliding_window": 40}
OPTIONS = [
    {},
    {"vocabulary": None},
    {"fc_norm": True, "norm_output": True},
    {"layers": [1, 6]},
    SPECULATORS,
    {"qk_norm": True, "sliding_window": 40, "layers": [1, 2, 4, 6]},
    {"num_layers": 3, "attention_bias": True},
    {"qk_norm": True, "num_layers": 2, "own_embedding": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_comes_back_bit_by_bit(published, target, save, tmp_path, options, dtype):
    head, directory = published(dtype, **options)
    imported = import_head(directory, target)
    if dtype == "float32":
        same(head, imported)
    again = export(save(imported), VLLM(dtype=dtype), tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (directory / file).read_bytes(), file


@pytest.mark.parametrize("key", ["ptd_token_id", "pard_token", "mask_token_id"])
def test_a_p_eagle_head_comes_back_by_every_name_of_its_mask(make_drafter, save, target, tmp_path, key):
    head = make_drafter("p_eagle", mask_token=7, ttt_steps=8, num_layers=2)
    directory = export(save(head), VLLM(dtype="float32"), tmp_path / "public")
    config = json.loads((directory / "config.json").read_text())
    config[key] = config.pop("ptd_token_id")
    (directory / "config.json").write_text(json.dumps(config))
    imported = import_head(directory, target)
    assert type(imported) is PEagle
    same(head, imported)


# --- layouts ----------------------------------------------------------------------------------------------------------


def as_eagle(config, tensors):
    """EAGLE's own: no layers named (2, L//2, L-3 are meant), a smaller context, tables, the embedding."""
    for key in ("eagle_aux_hidden_state_layer_ids", "eagle_config", "fc_norm", "norm_output", "norm_before_fc"):
        del config[key]
    config["max_position_embeddings"] = 64
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def as_sglang(config, tensors):
    for old, new in (("fc_norm.0", "aux_norm_low"), ("fc_norm.1", "aux_norm_mid"), ("fc_norm.2", "aux_norm_high")):
        tensors[f"{new}.weight"] = tensors.pop(f"{old}.weight")
    del config["fc_norm"], config["eagle_aux_hidden_state_layer_ids"]
    config["use_aux_norm"] = True


def as_speculators(config, tensors):
    layer = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    layer += ("rms_norm_eps", "rope_theta", "max_position_embeddings", "hidden_act", "num_hidden_layers", "model_type")
    layer += ("attention_bias", "sliding_window", "use_sliding_window", "layer_types")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config["draft_vocab_size"],
        **{flag: config[flag] for flag in flags},
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "transformer_layer_config": {key: config[key] for key in layer if key in config},
    }, {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if not re.match(r"layers.\d+.hidden_norm", name)  # SGLang's
    }


def test_the_layout_of_eagle(rewritten, target):
    # L = 7: engines take (2, 3, 4), as our default is.
    head, directory = rewritten(as_eagle)
    tensors = load_file(directory / "model.safetensors")
    tensors["embed_tokens.weight"] = target.embedding_weight.clone()
    save_file(tensors, directory / "model.safetensors")
    same(head, import_head(directory, target))


def test_the_layout_of_sglang(rewritten, target):
    head, directory = rewritten(as_sglang, fc_norm=True)
    with pytest.raises(UserError, match=r"SGLang reads them as .* after \[2, 3, 4\] layers, vLLM as after \[1, 2, 3\]"):
        import_head(directory, target)
    same(head, import_head(directory, target, layers=[2, 3, 4]))


@pytest.mark.parametrize("options", OPTIONS)
def test_the_layout_of_speculators(rewritten, target, options):
    head, directory = rewritten(as_speculators, **options)
    same(head, import_head(directory, target))


def speculators_by_default(config, tensors):
    config, tensors = as_speculators(config, tensors)
    del config["norm_before_residual"]
    return config, tensors


def test_what_speculators_leaves_out_is_what_vllm_takes_it_for(rewritten, target):
    head, directory = rewritten(speculators_by_default, norm_before_residual=True)
    same(head, import_head(directory, target))


def test_the_norm_of_a_further_layer_by_either_name(rewritten, target):
    def as_sglang_alone(config, tensors):
        del tensors["layers.1.input_layernorm.weight"]

    head, directory = rewritten(as_sglang_alone, num_layers=2)
    same(head, import_head(directory, target))

    def with_two(config, tensors):
        tensors["layers.1.hidden_norm.weight"] += 1.0

    _, directory = rewritten(with_two, num_layers=2)
    with pytest.raises(UserError, match=r"layers\.1\.input_layernorm\.weight and .*hidden_norm.weight differ"):
        import_head(directory, target)


def test_what_engines_share_or_make_up_is_filled_in(rewritten, target):
    def without_head(config, tensors):
        del tensors["lm_head.weight"], config["draft_vocab_size"]

    _, directory = rewritten(without_head, vocabulary=None)
    assert torch.equal(import_head(directory, target).lm_head.weight, target.head.weight)

    def without_t2d(config, tensors):
        del tensors["t2d"]
        tensors["d2t"] = tensors["d2t"].int()

    head, directory = rewritten(without_t2d)
    same(head, import_head(directory, target))


def test_an_embedding_of_its_own_comes_along_and_a_copy_of_the_targets_does_not(rewritten, target):
    own = torch.randn(97, 32, generator=torch.Generator().manual_seed(0))
    for held in (own, target.embedding_weight.clone()):
        _, directory = rewritten(lambda config, tensors, held=held: tensors.update({"embed_tokens.weight": held}))
        head = import_head(directory, target)
        assert head.config()["own_embedding"] == (held is own)
        assert torch.equal(head.embed(torch.arange(97)), held)


def test_a_window_is_where_layer_types_say_so(rewritten, target):
    _, directory = rewritten(lambda config, tensors: config.update(sliding_window=40))
    assert import_head(directory, target).sliding_window is None


def test_rope_scaling_comes_along(rewritten, target):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64

    _, directory = rewritten(lambda config, tensors: config.update(rope_scaling=scaling))
    assert import_head(directory, target).config()["rope_parameters"] == {"rope_theta": 5000.0, **scaling}


# --- refusals ---------------------------------------------------------------------------------------------------------


def adding(name, *shape):
    return lambda config, tensors: tensors.update({name: torch.ones(*shape)})


def setting(**keys):
    return lambda config, tensors: config.update(keys)


def dropping(name):
    return lambda config, tensors: tensors.__delitem__(name)


def of_other_layers(config, tensors):
    config, tensors = as_speculators(config, tensors)
    config["transformer_layer_config"]["model_type"] = "qwen3_next"
    return config, tensors


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (setting(speculators_model_type="xpress"), "type 'xpress': expected eagle3, peagle, dflash, dspark"),
        (of_other_layers, "layers of the type 'qwen3_next': expected llama or qwen3"),
        (setting(num_hidden_layers=900), r"config\.json asks for more than \d+ weights"),
        (setting(num_hidden_layers=2), r"missing: layers\.1\.hidden_norm\.weight"),
        (adding("layers.1.self_attn.q_proj.weight", 32, 32), r"unknown: layers\.1\.self_attn"),
        (adding("midlayer.self_attn.q_norm.weight", 8), "says qk_norm=false, and the tensors are those of the con"),
        (setting(architectures=["Eagle3Qwen3ForCausalLM"]), "says qk_norm=true"),
        (adding("midlayer.self_attn.q_proj.bias", 32), "says attention_bias=false"),
        (setting(attention_bias=True), "attention_bias=true"),
        (adding("fc.bias", 32), "a bias in fc"),
        (adding("midlayer.mlp.up_proj.bias", 48), "a bias in up_proj"),
        (
            setting(eagle_config={"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}),
            "norm_before_fc=true",
        ),
        (adding("input_norm.weight", 96), "norm_before_fc=false"),
        (setting(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2), "layers of one kind"),
        (setting(target_hidden_size=64), "target_hidden_size=64"),
        (setting(hidden_act="gelu"), "hidden_act=gelu"),
        (setting(fc_norm=True), "fc_norm=true"),
        (
            adding("mask_hidden", 1, 96),
            r"drafts in parallel, and its mask token is None: expected an id, as mask_token_",
        ),
        (adding("surprise.weight", 3), r"unknown: surprise\.weight"),
        (dropping("fc.weight"), r"missing: fc\.weight"),
        (dropping("lm_head.weight"), r"missing: lm_head\.weight"),
        (dropping("d2t"), "lacks d2t"),
        (lambda config, tensors: tensors.update(d2t=tensors["d2t"] + torch.arange(32)), "not absolute ids"),
        (setting(hidden_size=64), "hidden_size is 64 and the target's 32"),
        (setting(vocab_size=128), "vocab_size is 128 and the target's 97"),
        (setting(eagle_aux_hidden_state_layer_ids=[2, 3, 9]), r"auxiliary layers are \[2, 3, 9\]"),
        (setting(eagle_aux_hidden_state_layer_ids=[2, 3]), r"fc\.weight is .* \[32, 96\]: expected .* \[32, 64\]"),
    ],
)
def test_what_our_head_does_not_compute_is_refused_by_name(rewritten, target, change, expected):
    _, directory = rewritten(change)
    with pytest.raises(UserError, match=expected):
        import_head(directory, target)


def test_an_eagle3_head_under_the_name_of_its_layer(rewritten, target):
    head, directory = rewritten(setting(architectures=["LlamaForCausalLM"]))
    same(head, import_head(directory, target))


def test_files_that_are_missing_or_damaged(published, target, tmp_path):
    _, directory = published()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        import_head(tmp_path / "nowhere", target)
    (directory / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="is damaged"):
        import_head(directory, target)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        import_head(directory, target)
