"""The first command: every drafter on every large target composes a sane run, which trains in small."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM

from specdraft.data.sources.self_written import SelfWritten
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.entry import build
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.targets import Target
from specdraft.training.fit import fit
from specdraft.training.monitoring.loggers import build_loggers
from specdraft.training.planning.meta_target import shape_config
from specdraft.training.planning.plan import make_plan
from specdraft.training.preflight import prepare_run

CONF = Path(__file__).parents[2] / "conf"
MODELS = ("dflash", "domino", "draft", "dspark", "eagle", "eagle3", "eagle3_1", "hydra", "medusa", "mtp", "p_eagle")
MODELS += ("jacobi_forcing", "kangaroo", "redrafter")
# The target itself is trained: for large ones there are no recipes.
TUNING = ("jacobi_forcing",)
SEQUENCE_LENGTHS = {
    "gpt-oss-20b": 8192,
    "llama-70b": 4096,
    "llama-8b": 4096,
    "qwen3-235b-a22b": 8192,
    "qwen3-30b-a3b": 8192,
    "qwen3-8b": 8192,
}
QUESTIONS = [f"What is {i} plus {i + 1}? Answer in one sentence, please." for i in range(40)]
VOCAB = 400
# Sizes alone: what distinguishes the architecture (experts, windows, sinks, rope, norms) stays as published.
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
    "max_position_embeddings": 256,
}


def shrunken(shape: dict[str, Any], folder: Path) -> Path:
    """A random target of the published architecture in small, with a tokenizer of its own."""
    small = {name: SMALL.get(name, value) for name, value in shape.items()}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config(small | ends | {"initializer_range": 0.3}))
    model.save_pretrained(folder)
    train_tokenizer(QUESTIONS, VOCAB, 256).save_pretrained(folder)
    return folder


def composed(*overrides: str, name: str = "train") -> DictConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return compose(name, list(overrides), return_hydra_config=name == "train")


def test_there_is_a_recipe_for_every_target_and_model():
    assert {path.stem for path in (CONF / "target").glob("*.yaml")} == {"tiny", "smollm2-135m", *SEQUENCE_LENGTHS}
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_a_small_chat_target_asks_itself(model):
    config = composed(f"model={model}", "target=smollm2-135m", "data=self")
    source = build(config.data.source)
    assert isinstance(source, SelfWritten)
    assert None in source.topics and any("mathematics" in (topic or "") for topic in source.topics)
    questions, answers = config.data.source.max_question_tokens, config.data.max_new_tokens
    assert questions + answers < config.data.sequence_length - 64
    assert config.target.dtype == "float32" and config.trainer.accelerator == "auto"


def test_what_a_small_chat_target_wrote_is_there_already():
    data = composed("target=smollm2-135m").data
    assert not data.regenerate and data.benchmark.benchmark == "chat"
    conversations = build(data).preparation.source.conversations("train")
    assert len(conversations) > 500
    assert {len(conversation.messages) for conversation in conversations[:100]} == {2}


def test_an_mtp_layer_needs_heads_that_share_the_width():
    config = composed("model=mtp", "target=gpt-oss-20b")
    shape = OmegaConf.to_container(config.target_shape, resolve=True)
    with pytest.raises(UserError, match="2880 wide and has 64 heads, whose shares cannot be rotated"):
        make_plan(config, shape_config(shape), "published shape")


@pytest.mark.parametrize(
    ("model", "target"),
    [
        (model, target)
        for model, target in product(MODELS, SEQUENCE_LENGTHS)
        if (model, target) != ("mtp", "gpt-oss-20b") and model not in TUNING
    ],
)
def test_the_first_command_is_a_real_run_that_fits_a_node(model, target):
    config = composed(f"model={model}", f"target={target}")
    data = config.data
    sources = OmegaConf.to_container(data.source.sources, resolve=False)
    assert {source["path"] for source in sources.values()} == {
        "HuggingFaceH4/ultrachat_200k",
        "ise-uiuc/Magicoder-Evol-Instruct-110K",
        "AI-MO/NuminaMath-CoT",
    }
    assert data.regenerate and data.limit == 200_000
    assert data.sequence_length == SEQUENCE_LENGTHS[target]
    reasoning = data.sequence_length == 8192
    least = 4096 if reasoning else 2048
    assert least <= data.max_new_tokens < data.sequence_length
    assert config.live.max_new_tokens >= (2048 if reasoning else 512)
    assert config.decoding.max_new_tokens >= (4096 if reasoning else 1024)
    assert (config.trainer.accelerator, config.trainer.precision) == ("gpu", "bf16-mixed")
    assert config.evaluate == (config.target.placement != "zero3")
    assert (config.export is None) == (model in ("hydra", "domino", "kangaroo", "redrafter"))
    assert config.model.drafter.get("num_heads", 5) >= config.decoding.num_draft_tokens

    shape = OmegaConf.to_container(config.target_shape, resolve=True)
    plan = make_plan(config, shape_config(shape), "published shape")
    assert plan.devices == 8
    assert plan.tokens_per_update == 65_536
    assert plan.memory_per_device < 0.93 * plan.memory_there, plan.memory  # CUDA and NCCL take some GB
    # Most take less than a day; the small chunks of five heads over a whole vocabulary cost one of 70B 30 hours.
    assert 0.5 < plan.hours(plan.tokens_per_update * plan.max_steps) < 24


@pytest.mark.parametrize("model", TUNING)
def test_to_tune_a_large_target_needs_more_than_its_recipe_has(model):
    """As the documentation says: it is trained through all of its layers, and ``plan=true`` tells."""
    config = composed(f"model={model}", "target=llama-8b")
    assert config.export is None
    plan = make_plan(config, shape_config(OmegaConf.to_container(config.target_shape, resolve=True)), "published shape")
    assert plan.memory_per_device > plan.memory_there
    assert plan.target_forward < plan.drafter_backward < 2 * plan.target_forward
    assert plan.drafter_parameters < 0.02 * plan.target_parameters


def test_the_command_line_wins_over_the_recipe():
    config = composed(
        "target=qwen3-8b", "data=messages", "data.path=chats.jsonl", "trainer=cpu", "data.sequence_length=512",
        "trainer.max_steps=7", "live.prompts=3", "strategy=ddp", "export=sglang",
    )  # fmt: skip
    assert config.data.path == "chats.jsonl" and "sources" not in config.data.source
    assert config.data.limit == 20_000  # of data=messages: the limit belongs to the public sets
    assert (config.data.sequence_length, config.data.max_new_tokens) == (512, 6144)
    assert (config.trainer.accelerator, config.trainer.precision, config.trainer.max_steps) == ("cpu", "32-true", 7)
    assert (config.live.prompts, config.live.max_new_tokens, config.export) == (3, 2048, "sglang")
    assert config.strategy._target_.endswith("DDPStrategy")


@pytest.mark.parametrize("name", ["regenerate", "store"])
def test_the_same_words_give_the_same_data(name):
    words = ["model=medusa", "target=qwen3-30b-a3b"]
    trained, prepared = composed(*words).data, composed(*words, name=name).data
    assert OmegaConf.to_container(trained, resolve=False) == OmegaConf.to_container(prepared, resolve=False)


def test_an_experiment_changes_the_recipe():
    config = composed("target=llama-8b", "experiment=short")
    assert (config.trainer.max_steps, config.data.limit, config.data.sequence_length) == (500, 4000, 4096)
    config = composed("target=llama-8b", "experiment=one-gpu")
    assert config.trainer.devices == 1 and config.trainer.accelerator == "gpu"
    assert config.trainer.accumulate_grad_batches * config.data.batch_size * config.data.sequence_length == 65_536


@pytest.mark.parametrize("name", SEQUENCE_LENGTHS)
def test_it_runs_in_small(name, tmp_path, monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {i}."}]}
        for i, question in enumerate(QUESTIONS)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"target={name}",
        "target.placement=replicated",
        f"target.name={tmp_path / 'target'}",
        "target.dtype=float32",
        "data=messages",
        f"data.path={tmp_path / 'chat.jsonl'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.source.held_out=0.3",
        "data.sequence_length=128",
        "data.max_new_tokens=8",
        "data.batch_size=2",
        "model.draft_vocab_size=200",
        "model.drafter.ttt_steps=3",
        "trainer=cpu",
        "trainer.max_steps=2",
        "trainer.log_every_n_steps=1",
        "trainer.val_check_interval=2",
        "live={every_n_steps: 2, prompts: 2, max_new_tokens: 8}",
        "decoding.num_draft_tokens=3",
        f"hydra.run.dir={tmp_path / 'run'}",
        f"hydra.runtime.output_dir={tmp_path / 'run'}",
    ]
    config = composed(*overrides)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", config)
    config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    shape = OmegaConf.to_container(config.target_shape, resolve=True)
    shrunken(shape, tmp_path / "target")

    target: Target = build(config.target)
    assert target.config.model_type == shape["model_type"]
    data = build(config.data)
    data.prepare(target)
    run = prepare_run(config)
    module = fit(config, target, data, build_loggers(config, run.directory, None), run)
    assert module.trainer.global_step == 2
    assert {"acceptance_length", "train/loss"} <= set(module.trainer.callback_metrics)
    exported = export(tmp_path / "run", build(OmegaConf.load(CONF / "engine" / "vllm.yaml")))
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
