"""The exported directory against an independent reader: plain JSON, plain safetensors, the engine's arithmetic."""

import json
import shlex

import pytest
import torch
from safetensors import safe_open

from specdraft.decoding.passes import Pass
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.sglang import SGLang
from specdraft.export.vllm import VLLM
from tests.drafters.alone import Alone
from tests.export.engine_reference import draft_like_vllm


def read(directory):
    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", "pt") as file:
        return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def test_golden_files(make_checkpoint):
    head, checkpoint = make_checkpoint()
    directory = export(checkpoint, VLLM())
    assert directory == checkpoint.parent / "export-vllm"
    assert sorted(file.name for file in directory.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "target.json",
    ]
    config, tensors = read(directory)
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "draft_vocab_size": 32,
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
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "num_aux_hidden_states": 3,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (32, 96),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (32, 32),
        "d2t": (32,),
        "t2d": (97,),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (tensors["d2t"] + torch.arange(32)).tolist() == list(range(1, 97, 3))
    for name, value in head.state_dict().items():
        assert torch.equal(tensors[name], value), name


@torch.inference_mode()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"layers": [1, 6]},
        {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "sliding_window": 6},
        {"qk_norm": True, "num_layers": 2, "layers": [1, 2, 4, 6], "sliding_window": 6},
        {"attention_bias": True, "num_layers": 3, "own_embedding": True},
    ],
)
@pytest.mark.parametrize("whole_vocabulary", [False, True])
def test_an_engine_drafts_the_same_tokens_from_the_files(target, make_checkpoint, options, whole_vocabulary):
    """End to end, from layer ids to drafted ids, by an implementation that shares nothing with ours."""
    head, checkpoint = make_checkpoint(**({"vocabulary": None} if whole_vocabulary else {}), **options)
    config, tensors = read(export(checkpoint, VLLM()))
    assert ("d2t" in tensors) is not whole_vocabulary  # vLLM has no such parameter then and would not load
    shifted = config | {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in head.layers]}
    ours, theirs, mistaken = [], [], []
    for prompt in torch.randint(0, 97, (8, 9), generator=torch.Generator().manual_seed(2)).tolist():
        features = target.step(Pass.prompt(prompt, target.device), target.new_cache(1, 64), head.layers)
        first = int(target.logits(features.last[:, -1]).argmax())
        state = Alone(head, prompt[0])
        state.advance(torch.tensor([*prompt[1:], first]), features)
        ours.append(state.draft(StaticTree.chain(4)).tokens[0].tolist())
        theirs.append(draft_like_vllm(config, tensors, target.model, prompt, first, 4))
        mistaken.append(draft_like_vllm(shifted, tensors, target.model, prompt, first, 4))
    assert ours == theirs
    assert ours != mistaken  # the test would see ids that are off by one


def test_layer_k_is_k_for_vllm_and_k_minus_1_for_sglang(make_checkpoint):
    _, checkpoint = make_checkpoint(layers=[1, 3, 6])
    config, _ = read(export(checkpoint, SGLang()))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]


def test_dtype_is_the_targets_unless_chosen(make_checkpoint, tmp_path):
    head, checkpoint = make_checkpoint(about={"dtype": "bfloat16", "bos_token_id": None})
    config, tensors = read(export(checkpoint, VLLM(), tmp_path / "auto"))
    assert config["torch_dtype"] == "bfloat16" and tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["fc.weight"], head.fc.weight.bfloat16())
    assert "bos_token_id" not in config
    config, tensors = read(export(checkpoint, VLLM(dtype="float32"), tmp_path / "chosen"))
    assert config["torch_dtype"] == "float32" and tensors["fc.weight"].dtype == torch.float32
    with pytest.raises(UserError, match=r"engine\.dtype is 'int8'"):
        VLLM(dtype="int8")


def test_positions_and_rope_scaling_are_the_targets(make_checkpoint, tmp_path):
    """vLLM silently stops drafting behind a smaller max_position_embeddings."""
    _, checkpoint = make_checkpoint()
    stored = json.loads((checkpoint / "config.json").read_text())
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    stored["drafter"]["rope_parameters"] = {"rope_theta": 5e5, **scaling}
    (checkpoint / "config.json").write_text(json.dumps(stored))
    config, _ = read(export(checkpoint, VLLM(), tmp_path / "scaled"))
    assert config["max_position_embeddings"] == 128
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == scaling


def test_model_card(make_checkpoint, identity):
    _, checkpoint = make_checkpoint()
    card = (export(checkpoint, VLLM()) / "README.md").read_text()
    assert identity["name"] in card and identity["config_hash"] in card and "Not measured" in card
    assert '"num_speculative_tokens": 4' in card and str(checkpoint.parent / "export-vllm") in card
    row = {
        "drafter": "eagle3",
        "temperature": 0.0,
        "drafting": "greedy",
        "acceptance_length": 2.345,
        "draft_acceptance_rate": 0.336,
        "speedup": 1.5,
        "conditional_acceptance_rate": [0.75, None],
    }
    settings = {"prompts": 40, "max_new_tokens": 128, "draft_tree": "chain of 4", "dtype": "float32", "device": "cpu"}
    evaluation = {"created": "2026-01-02", "settings": settings, "results": [row]}
    (checkpoint.parent / "evaluation.json").write_text(json.dumps(evaluation))
    card = (export(checkpoint.parent, VLLM()) / "README.md").read_text()
    assert "| eagle3 | 0 | greedy | 2.35 | 0.336 | 1.50 | 0.75, – |" in card and "40 prompts" in card
    assert "Above temperature 0 vllm" not in card
    warm = [row | {"temperature": 1.0, "drafting": drafting} for drafting in ("greedy", "sampled")]
    for rows, said in ((warm, "what the rows with greedy drafts describe"), (warm[1:], "none was measured")):
        (checkpoint.parent / "evaluation.json").write_text(json.dumps(evaluation | {"results": [row, *rows]}))
        card = (export(checkpoint.parent, VLLM()) / "README.md").read_text()
        assert "| eagle3 | 1 | sampled | 2.35 |" in card
        assert "Above temperature 0 vllm makes greedy drafts unless it is told otherwise: " in card and said in card
    assert '"draft_sample_method": "probabilistic"' in card
    advice = {"num_speculative_tokens": 2, "sentence": "Draft 2 tokens a round."}
    (checkpoint.parent / "evaluation.json").write_text(json.dumps(evaluation | {"advice": [advice]}))
    card = (export(checkpoint.parent, VLLM()) / "README.md").read_text()
    assert "Draft 2 tokens a round." in card and '"num_speculative_tokens": 2' in card and "cost model" in card
    settings |= {"found_drafts": {"eagle3, T=0": "dynamic tree of 8"}, "batch_size": 4}
    advice |= {"tree": {"depth": 3, "top_k": 4, "num_nodes": 8, "speedup": 1.7}}
    (checkpoint.parent / "evaluation.json").write_text(json.dumps(evaluation | {"advice": [advice]}))
    card = (export(checkpoint.parent, SGLang()) / "README.md").read_text()
    assert "found by a few drafts (eagle3, T=0: dynamic tree of 8), 4 requests side by side, " in card
    assert "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3" in card
    assert "`--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 9` instead" in card
    settings |= {"unmeasured_sampling": "temperature 0.6, top_k 20"}
    settings |= {"sampling": {"0": {"said": "temperature 0"}, "1": {"said": "temperature 1, top_k 5"}}}
    (checkpoint.parent / "evaluation.json").write_text(json.dumps(evaluation))
    card = (export(checkpoint.parent, VLLM()) / "README.md").read_text()
    assert "temperature 1, top_k 5, rejection sampling, measured by" in card
    assert "Not measured: temperature 0.6, top_k 20, as engines sample this target unless" in card
    (checkpoint.parent / "evaluation.json").write_text('{"results": 3}')
    with pytest.raises(UserError, match="not an evaluation that specdraft wrote"):
        export(checkpoint, VLLM())


def test_the_card_serves_with_the_options_of_the_chat_template(make_checkpoint):
    _, checkpoint = make_checkpoint()
    assert "chat_template_kwargs" not in (export(checkpoint, VLLM()) / "README.md").read_text()
    _, checkpoint = make_checkpoint(about={"chat_template_options": {"enable_thinking": False}})
    card = (export(checkpoint, VLLM()) / "README.md").read_text()
    assert "--default-chat-template-kwargs '{\"enable_thinking\": false}' --speculative-config" in card
    assert "llm.chat(messages, chat_template_kwargs={'enable_thinking': False})" in card
    card = (export(checkpoint, SGLang()) / "README.md").read_text()
    assert '`"chat_template_kwargs": {"enable_thinking": false}`' in card


def test_the_card_says_how_the_answers_were_sampled(make_checkpoint):
    _, checkpoint = make_checkpoint()
    config = json.loads((checkpoint / "config.json").read_text())
    config["extra"]["data"] |= {"regenerated": True, "temperatures": [0.0, "served"]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    card = (export(checkpoint, VLLM()) / "README.md").read_text()
    assert ", answered by the target at temperature 0, as it is served |" in card


def test_the_card_names_a_targets_directory_wherever_the_engine_is_started(make_checkpoint, tmp_path, monkeypatch):
    _, checkpoint = make_checkpoint()
    config = json.loads((checkpoint / "config.json").read_text())
    config["target"]["name"] = "./own-target"
    (checkpoint / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert "vllm serve ./own-target" in (export(checkpoint, VLLM()) / "README.md").read_text()  # not there: as it is
    (tmp_path / "own-target").mkdir()
    assert f"vllm serve {tmp_path / 'own-target'}" in (export(checkpoint, VLLM()) / "README.md").read_text()


def test_the_cards_command_takes_paths_with_spaces(make_checkpoint, tmp_path):
    _, checkpoint = make_checkpoint()
    config = json.loads((checkpoint / "config.json").read_text())
    config["target"]["name"] = str(tmp_path / "it's my target")
    (checkpoint / "config.json").write_text(json.dumps(config))
    card = (export(checkpoint, VLLM(), tmp_path / "its head") / "README.md").read_text()
    command = next(line for line in card.splitlines() if line.startswith("vllm serve"))
    _, _, target, *options = shlex.split(command)
    told = json.loads(options[options.index("--speculative-config") + 1])
    assert target == str(tmp_path / "it's my target") and told["model"] == str(tmp_path / "its head")


def test_an_earlier_export_is_replaced_and_nothing_else(make_checkpoint, tmp_path):
    _, checkpoint = make_checkpoint()
    output = tmp_path / "out"
    output.mkdir()
    assert export(checkpoint, VLLM(), output) == output
    (output / "config.json").write_text("stale")
    assert read(export(checkpoint, VLLM(), output))[0]["model_type"] == "llama"
    (output / "thesis.tex").write_text("all my work")
    with pytest.raises(UserError, match="not an earlier export"):
        export(checkpoint, VLLM(), output)
    assert (output / "thesis.tex").read_text() == "all my work"


def test_a_target_that_vllm_serves_without_eagle3_is_refused_by_name(make_checkpoint):
    _, checkpoint = make_checkpoint(about={"architecture": "MixtralForCausalLM"})
    with pytest.raises(UserError, match="for the target architecture MixtralForCausalLM"):
        export(checkpoint, VLLM())
    assert not (checkpoint.parent / "export-vllm").exists()


def test_a_drafter_that_no_engine_loads_is_refused_by_name(target, tmp_path):
    checkpoint = save_drafter(PromptLookup(), tmp_path / "lookup", target.identity)
    with pytest.raises(UserError, match="a PromptLookup, which no serving engine loads"):
        export(checkpoint, VLLM())
