"""Every family for every engine: exact names, shapes, dtypes and keys, and the traps that engines are silent about."""

import ast
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdraft.drafters.checkpoint import about_target
from specdraft.drafters.dflash import Domino
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.hydra import Hydra
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.eagle3 import OPTIONS
from specdraft.export.engine import SAMPLED
from specdraft.export.layout import TITLES
from specdraft.export.recurrent_drafting import RecurrentDrafting
from specdraft.export.sglang import SGLang
from specdraft.export.speculators import Speculators
from specdraft.export.tensorrt_llm import TensorRTLLM
from specdraft.export.transformers import Transformers
from specdraft.export.vllm import VLLM
from specdraft.export.writer import layout_for
from specdraft.targets import Target
from tests.families import FAMILIES as ARCHITECTURES

WEIGHTS = {"medusa": "medusa_lm_head.safetensors"}
SERVED = {
    VLLM: {"eagle3", "eagle", "p_eagle", "mtp", "medusa", "dflash", "dspark", "draft_model", "pard", "tli_draft"},
    SGLang: {"eagle3", "eagle", "draft_model"},
    TensorRTLLM: {"eagle3", "medusa", "draft_model"},
    Transformers: {"draft_model"},
    RecurrentDrafting: {"redrafter"},
    Speculators: {"eagle3", "p_eagle", "dflash", "dspark"},
}
FAMILIES = sorted(SERVED[VLLM] | {"redrafter"})
LLAMA_LAYER = {
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "post_attention_layernorm.weight": (32,),
}


@pytest.fixture
def exported(make_drafter, save):
    """exported(engine, family, about, **options) -> (drafter, config, tensors, card)."""

    def run(engine, family, about=None, **options):
        drafter = make_drafter(family, **options)
        directory = export(save(drafter, about), engine)
        weights = WEIGHTS.get(family, "model.safetensors")
        others = {"tokenizer.json", "tokenizer_config.json"} if family == "tli_draft" else set()
        written = {"README.md", "config.json", "target.json", weights} | others
        assert {file.name for file in directory.iterdir()} == written
        config = json.loads((directory / "config.json").read_text())
        return drafter, config, load_file(directory / weights), (directory / "README.md").read_text()

    return run


def shapes(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("engine", SERVED)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_served_is_written_and_the_rest_refused_by_name(exported, engine, family):
    if family in SERVED[engine]:
        card = exported(engine(), family)[3]
        assert f"## Serving with {engine.name}" in card
        for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
            names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
            assert not names & {"true", "false", "null"}  # JSON's words
    else:
        title = f"({'|'.join(TITLES.values())})"
        with pytest.raises(UserError, match=rf"^{engine.name} serves no {title}: expected"):
            exported(engine(), family)


@pytest.mark.parametrize("engine", SERVED)
@pytest.mark.parametrize("kind", [Hydra, Domino])
def test_some_are_served_by_no_engine(target, save, engine, kind):
    with pytest.raises(UserError, match=f"a {kind.__name__}, which no serving engine loads"):
        export(save(kind.for_target(target)), engine())


# --- Medusa -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [VLLM, TensorRTLLM])
def test_medusa_files(exported, engine):
    heads, config, tensors, _ = exported(engine(), "medusa", num_heads=3, num_layers=2)
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 97,
        "medusa_num_heads": 3,
        "num_medusa_heads": 3,
        "medusa_num_layers": 2,
        "medusa_fc_bias": True,  # without it vLLM drops the biases and says nothing
        "torch_dtype": "float32",
    }
    expected = {}
    for head in range(3):
        for block in range(2):
            expected |= {f"{head}.{block}.linear.weight": (32, 32), f"{head}.{block}.linear.bias": (32,)}
        expected[f"{head}.2.weight"] = (97, 32)
    assert shapes(tensors) == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    last = torch.randn(5, 32)
    for head in range(3):
        hidden = last
        for block in range(2):
            linear = torch.nn.functional.linear(
                hidden, *(tensors[f"{head}.{block}.linear.{x}"] for x in ("weight", "bias"))
            )
            hidden = hidden + torch.nn.functional.silu(linear)
        theirs = hidden @ tensors[f"{head}.2.weight"].T
        assert torch.allclose(theirs, heads.lm_heads[head](heads.blocks[head](last)), atol=1e-5)


def test_no_key_makes_vllm_count_other_heads(exported):
    """Its Medusa configuration takes every key with "num" and "heads" or "layers" for the one it looks for."""
    _, config, _, _ = exported(VLLM(), "medusa", num_heads=3, num_layers=2)
    assert {value for key, value in config.items() if "num" in key and "heads" in key} == {3}
    assert {value for key, value in config.items() if "num" in key and "layers" in key} == {2}


def test_medusa_with_a_pruned_vocabulary_is_refused(exported):
    with pytest.raises(UserError, match=r"draft vocabulary of 32 of 97 tokens.*model\.draft_vocab_size=null"):
        exported(VLLM(), "medusa", draft_vocabulary=torch.arange(1, 97, 3))


def test_medusa_drafts_no_further_than_its_heads(exported):
    assert '"num_speculative_tokens": 3' in exported(VLLM(), "medusa", num_heads=3)[3]
    card = exported(TensorRTLLM(), "medusa", num_heads=3)[3]
    assert "Releases up to 1.2 only" in card and "removed in July 2026" in card
    assert "max_draft_len=3" in card and "medusa_choices=[[0], [0, 0], [0, 0, 0]]" in card


# --- EAGLE-1 ----------------------------------------------------------------------------------------------------------


def test_an_eagle_head_tells_vllm_what_its_target_multiplies_logits_by(exported):
    assert exported(VLLM(), "eagle", {"logit_scale": 0.125})[1]["logit_scale"] == 0.125
    assert "logit_scale" not in exported(VLLM(), "eagle")[1]


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Cohere2"])
def test_an_eagle_head_whose_target_has_no_projection_in_vllm_is_refused_there(exported, kind):
    about = {"architecture": f"{kind}ForCausalLM"}
    with pytest.raises(UserError, match=f"architecture {kind}ForCausalLM, whose class there has no lm_head"):
        exported(VLLM(), "eagle", about)
    exported(SGLang(), "eagle", about)


@pytest.mark.parametrize("engine", [VLLM, SGLang])
def test_eagle_files(exported, engine):
    head, config, tensors, _ = exported(engine(), "eagle")
    sglang = engine is SGLang
    assert config == {
        "architectures": ["LlamaForCausalLMEagle" if sglang else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    layer = {f"layers.0.{name}": shape for name, shape in LLAMA_LAYER.items()}
    # Left out, SGLang's bias stays as random as it was made; given, vLLM refuses the file.
    assert shapes(tensors) == {"fc.weight": (32, 64), **({"fc.bias": (32,)} if sglang else {}), **layer}
    assert not sglang or not tensors["fc.bias"].any()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensors[name.replace("midlayer.", "layers.0.")], tensor)


# --- P-EAGLE ----------------------------------------------------------------------------------------------------------


def test_p_eagle_files_are_those_of_eagle3_and_the_mask(exported):
    options = {"num_layers": 2, "norm_output": True}
    head, config, tensors, card = exported(VLLM(), "p_eagle", mask_token=7, ttt_steps=3, **options)
    _, plain, without, _ = exported(VLLM(), "eagle3", **options)
    assert config == plain | {"ptd_token_id": 7}
    assert shapes(tensors) == shapes(without) | {"mask_hidden": (1, 1, 96)}
    assert torch.equal(tensors["mask_hidden"], head.mask_hidden)
    assert '"num_speculative_tokens": 3, "parallel_drafting": true' in card  # no more than it was trained to draft


# --- DFlash -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_dflash_files(exported, whole):
    options = {"draft_vocabulary": None} if whole else {}
    drafter, config, tensors, card = exported(
        VLLM(), "dflash", num_layers=2, block_size=4, layers=[1, 3, 6], mask_token=5, causal=True, **options
    )
    size = 97 if whole else 32
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "draft_vocab_size": size,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "block_size": 4,
        "num_target_layers": 7,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        # Counted from 0, as published files do; vLLM adds one where the key above is absent.
        "dflash_config": {
            "mask_token_id": 5,
            "target_layer_ids": [0, 2, 5],
            "use_aux_hidden_state": True,
            "causal": True,
        },
    }
    layer = LLAMA_LAYER | {"input_layernorm.weight": (32,)}
    layer |= {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
    expected = {f"layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()}
    expected |= {"fc.weight": (32, 96), "hidden_norm.weight": (32,), "norm.weight": (32,), "lm_head.weight": (size, 32)}
    assert shapes(tensors) == expected | ({} if whole else {"d2t": (32,), "t2d": (97,)})
    for name, tensor in drafter.state_dict().items():
        if not (whole and name in ("d2t", "t2d")):
            assert torch.equal(tensors[name.replace("blocks.", "layers.")], tensor)
    assert '"num_speculative_tokens": 3' in card  # no more than it was trained to draft


@pytest.mark.parametrize("confident", [False, True])
def test_dspark_files_are_those_of_dflash_and_the_heads(exported, confident):
    options = {"num_layers": 2, "block_size": 4, "layers": [1, 3, 6], "mask_token": 5}
    drafter, config, tensors, card = exported(VLLM(), "dspark", markov_rank=6, confidence_head=confident, **options)
    _, plain, without, _ = exported(VLLM(), "dflash", **options)
    assert config == plain | {
        "architectures": ["Qwen3DSparkModel"],
        "sample_from_anchor": True,  # of speculators' files vLLM takes the contrary for granted
        "mask_token_id": 5,
        "target_layer_ids": [0, 2, 5],
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident,
    }
    heads = {"markov_head.markov_w1.weight": (97, 6), "markov_head.markov_w2.weight": (32, 6)}
    heads |= {"confidence_head.proj.weight": (1, 38), "confidence_head.proj.bias": (1,)} if confident else {}
    assert shapes(tensors) == shapes(without) | heads
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensors[name.replace("blocks.", "layers.")], tensor)
    assert '"num_speculative_tokens": 4' in card and "this layout was never run in it" in card
    before, hidden = torch.tensor([1, 50, 96]), torch.randn(3, 32)  # as vLLM's speculator computes them
    embedded = tensors["markov_head.markov_w1.weight"][before]
    bias = embedded @ tensors["markov_head.markov_w2.weight"].T
    ours = drafter.read_prefix(before[:, None])[:, 0]
    torch.testing.assert_close(drafter.projection(drafter.correction(hidden, ours)), bias)
    if confident:
        said = torch.cat([hidden, embedded], -1) @ tensors["confidence_head.proj.weight"].T
        torch.testing.assert_close(
            drafter.confidence_head(hidden, ours), said[:, 0] + tensors["confidence_head.proj.bias"]
        )


# --- draft models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [engine for engine in SERVED if "draft_model" in SERVED[engine]])
def test_a_draft_model_is_a_plain_transformers_directory(exported, engine, tmp_path):
    draft, config, tensors, _ = exported(engine(), "draft_model")
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 2
    assert config["vocab_size"] == 97 and config["max_position_embeddings"] == 128
    layer = LLAMA_LAYER | {"input_layernorm.weight": (32,)}
    assert shapes(tensors) == {
        "model.embed_tokens.weight": (97, 32),
        **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
        "model.norm.weight": (32,),
        "lm_head.weight": (97, 32),
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f"export-{engine.name}")
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, draft.export_model()(ids).logits)


def test_a_pard_draft_is_a_draft_model_and_its_mask(exported, tmp_path):
    draft, config, tensors, card = exported(VLLM(), "pard", mask_token=7, num_drafts=3)
    _, plain, others, _ = exported(VLLM(), "draft_model")
    assert config == plain | {"pard_token": 7} and shapes(tensors) == shapes(others)
    assert torch.equal(tensors["model.embed_tokens.weight"], draft.state_dict()["model.model.embed_tokens.weight"])
    assert '"num_speculative_tokens": 3' in card  # no more than it was trained to draft
    assert "| mask token | 7 |" in card and "| tokens drafted at once | 3 |" in card


def test_a_draft_with_another_tokenizer_brings_its_own_vocabulary(exported, tmp_path):
    draft, config, tensors, card = exported(VLLM(), "tli_draft", draft_vocab_size=90)
    assert config["vocab_size"] == 90 and tensors["model.embed_tokens.weight"].shape == (90, 32)
    assert f"| tokens shared with the target | {len(draft.shared.draft_ids)} of 97 |" in card
    assert (tmp_path / "run" / "export-vllm" / "tokenizer.json").read_bytes() == b"{}"
    exported(VLLM(), "tli_draft")  # in the place of the one before
    assert VLLM.flags("tli_draft", "DIR", 4, SAMPLED) is None


def test_a_draft_without_the_tokenizer_that_an_engine_reads_is_refused(make_drafter, save):
    draft = make_drafter("tli_draft")
    draft.files = {"tokenizer.json": b"{}"}
    with pytest.raises(UserError, match=r"no files of it: expected served_tokenizer.json in it"):
        export(save(draft), VLLM())


def test_a_draft_model_in_the_words_of_earlier_releases(exported):
    """Engines built on transformers 4 know no ``rope_parameters`` and would rotate by 10,000."""
    _, config, tensors, _ = exported(VLLM(dtype="bfloat16"), "draft_model")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("key", "value"), [("max_position_embeddings", 256), ("vocab_size", 101)])
def test_a_draft_model_must_follow_the_target_everywhere(exported, key, value):
    """vLLM stops drafting, silently, behind the draft's own last position."""
    with pytest.raises(UserError, match=rf"the draft model's {key} is \d+ and the target's {value}"):
        exported(VLLM(), "draft_model", about={key: value})


def test_a_draft_model_whose_layers_are_of_several_kinds_is_refused_by_vllm(tmp_path):
    target = Target.from_model(ARCHITECTURES["gemma3"].build().float())
    about = about_target(target)
    mixed, alike = (DraftModel.for_target(target, copy_layers=layers) for layers in (2, [1, 3]))
    with pytest.raises(UserError, match=r"layers are of several kinds \(full_attention, sliding_attention\)"):
        layout_for(mixed, about, VLLM(), tmp_path)
    assert layout_for(alike, about, VLLM(), tmp_path).config["layer_types"] == ["full_attention"] * 2
    layout_for(mixed, about, Transformers(), tmp_path)


def test_transformers_drafts_with_the_export_and_says_the_same(exported, target, tmp_path):
    exported(Transformers(), "draft_model")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export-transformers")
    ids = torch.arange(10, 20)[None]
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    assert torch.equal(
        target.model.generate(ids, assistant_model=draft, **options), target.model.generate(ids, **options)
    )


# --- what engines would do without a word -----------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["eagle-lab", "my-EAGLE3", "dflash", "DSpark-1"])
@pytest.mark.parametrize("family", sorted(SERVED[VLLM]))
def test_paths_from_which_vllm_concludes_another_method(make_drafter, save, tmp_path, part, family):
    checkpoint, output = save(make_drafter(family)), tmp_path / part / "served"
    if family in ("eagle", "eagle3", "p_eagle", "dflash", "dspark"):
        assert export(checkpoint, VLLM(), output) == output  # there vLLM believes the method it is told
    else:
        with pytest.raises(UserError, match=r"served contains .*, for which vLLM would load .* by another method"):
            export(checkpoint, VLLM(), output)


USED = {**OPTIONS, **dict.fromkeys(OPTIONS, True), "num_layers": 2, "sliding_window": 40}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_an_engine_ignores_of_an_eagle3_head_is_refused(exported, option):
    used = {option: USED[option]}
    with pytest.raises(UserError, match=f"head was trained with {option}, which tensorrt_llm ignores: expected none"):
        exported(TensorRTLLM(), "eagle3", **used)
    card = exported(VLLM(), "eagle3", **used)[3]
    assert f"| options | {option}={str(USED[option]).lower()} |" in card
    if option in ("fc_norm", "norm_output", "norm_before_fc", "num_layers"):
        assert f"{option}=" in exported(SGLang(), "eagle3", **used)[3]
    else:
        with pytest.raises(UserError, match=f"head was trained with {option}, which sglang ignores: expected none"):
            exported(SGLang(), "eagle3", **used)


def test_the_head_of_the_paper_has_no_options(exported):
    for engine in (VLLM, SGLang, TensorRTLLM):
        assert "| options |" not in exported(engine(), "eagle3")[3]


def test_vllm_is_told_of_every_option(exported):
    window = {"sliding_window": 40, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    flags = {"norm_before_fc": True, "norm_before_residual": True}
    _, config, tensors, _ = exported(VLLM(), "eagle3", qk_norm=True, num_layers=2, sliding_window=40, **flags)
    told = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2}
    assert config.items() >= (told | window | flags).items()
    layer = {f"layers.1.{name}": shape for name, shape in LLAMA_LAYER.items()}
    layer |= {f"layers.1.{name}.weight": (32,) for name in ("input_layernorm", "hidden_norm")}
    layer |= {f"{place}.self_attn.{name}_norm.weight": (8,) for place in ("midlayer", "layers.1") for name in "qk"}
    assert shapes(tensors).items() >= (layer | {"input_norm.weight": (96,)}).items()
    assert torch.equal(tensors["layers.1.input_layernorm.weight"], tensors["layers.1.hidden_norm.weight"])
    _, config, tensors, _ = exported(VLLM(), "eagle3", attention_bias=True, own_embedding=True)
    assert config["attention_bias"] is True and config["architectures"] == ["LlamaForCausalLMEagle3"]
    biases = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
    more = {f"midlayer.self_attn.{name}.bias": (size,) for name, size in biases.items()}
    assert shapes(tensors).items() >= (more | {"embed_tokens.weight": (97, 32)}).items()


@pytest.mark.parametrize("engine", [SGLang, TensorRTLLM])
def test_only_vllm_hands_out_what_the_last_layer_gives(exported, engine):
    config = exported(VLLM(), "eagle3", layers=[2, 7])[1]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 7] and config["num_aux_hidden_states"] == 2
    with pytest.raises(UserError, match=r"reads the target's layers \[2, 7\], and .* not hand out the last one, 7"):
        exported(engine(), "eagle3", layers=[2, 7])


def test_tensorrt_llm_is_told_layers_that_count_from_0(exported):
    _, config, _, card = exported(TensorRTLLM(), "eagle3", layers=[1, 3, 6])
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert "eagle3_layers_to_capture={0, 2, 5}" in card


# --- cards ------------------------------------------------------------------------------------------------------------

COMMANDS = {
    (VLLM, "eagle3"): '{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 4}',
    (VLLM, "eagle"): '{"method": "eagle", "model": "DIR", "num_speculative_tokens": 4}',
    (VLLM, "medusa"): '{"method": "medusa", "model": "DIR", "num_speculative_tokens": 4}',
    (VLLM, "draft_model"): '{"method": "draft_model", "model": "DIR", "num_speculative_tokens": 4}',
    (VLLM, "p_eagle"): '{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 4, "parallel_drafting": true}',
    (VLLM, "mtp"): '{"method": "mtp", "model": "DIR", "num_speculative_tokens": 4}',
    (VLLM, "pard"): '{"method": "draft_model", "model": "DIR", "num_speculative_tokens": 4, "parallel_drafting": true}',
    (VLLM, "tli_draft"): '{"method": "draft_model", "model": "DIR", "num_speculative_tokens": 4, '
    '"use_heterogeneous_vocab": true}',
    (VLLM, "dflash"): '{"method": "dflash", "model": "DIR", "num_speculative_tokens": 4}',
    (VLLM, "dspark"): '{"method": "dspark", "model": "DIR", "num_speculative_tokens": 4}',
    (SGLang, "eagle3"): "--speculative-algorithm EAGLE3 --speculative-draft-model-path DIR --speculative-num-steps 4 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5",
    (SGLang, "eagle"): "--speculative-algorithm EAGLE --speculative-draft-model-path DIR",
    (SGLang, "draft_model"): "--speculative-algorithm STANDALONE --speculative-draft-model-path DIR",
    (TensorRTLLM, "eagle3"): 'Eagle3DecodingConfig(max_draft_len=4, speculative_model="DIR", eagle3_one_model=True, '
    "eagle3_layers_to_capture={1, 2, 3})",
    (TensorRTLLM, "medusa"): 'MedusaDecodingConfig(max_draft_len=4, speculative_model="DIR", num_medusa_heads=5',
    (TensorRTLLM, "draft_model"): 'DraftTargetDecodingConfig(max_draft_len=4, speculative_model="DIR")',
    (
        RecurrentDrafting,
        "redrafter",
    ): "--hf_drafter DIR --beam_width 10 --beam_length 5 --greedy_search=True",
    (Transformers, "draft_model"): "draft.generation_config.num_assistant_tokens = 4",
}


@pytest.mark.parametrize(("engine", "family"), COMMANDS)
def test_the_card_says_how_to_serve(exported, identity, tmp_path, engine, family):
    card = exported(engine(), family)[3]
    assert COMMANDS[engine, family] in card.replace(str(tmp_path / "run" / f"export-{engine.name}"), "DIR")
    assert identity["name"] in card and identity["config_hash"] in card and "Not measured" in card
    assert "| training data | python-stdlib, answered by the target at temperature 0, 1 |" in card
    assert ("never run in it" in card) is (engine is TensorRTLLM or family == "dspark")
    assert ("takes no samples of a draft" in card) is (family == "tli_draft")
    assert ("vLLM drafts no trees" in card) is (family == "medusa" and engine is VLLM)


def test_a_python_example_is_python(exported):
    cards = [exported(engine(), family)[3] for engine, family in COMMANDS]
    blocks = [block.split("```")[0] for card in cards for block in card.split("```python\n")[1:]]
    assert blocks
    for block in blocks:
        compile(block, "card", "exec")
