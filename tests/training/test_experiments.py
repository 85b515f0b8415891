"""Every recipe trains, measures and exports on a shrunken target of its own architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.entry import build
from specdraft.export import export
from specdraft.targets import Target
from specdraft.training.fit import fit
from specdraft.training.monitoring.loggers import build_loggers
from specdraft.training.planning.meta_target import shape_config
from specdraft.training.preflight import prepare_run

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
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


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_runs_in_small(name, tmp_path, monkeypatch):
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {i}."}]}
        for i, question in enumerate(QUESTIONS)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"experiment={name}",
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
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("train", overrides, return_hydra_config=True)
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


def test_there_is_a_recipe_for_each_size_of_target():
    wanted = {"llama-8b", "llama-70b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b"}
    assert {name.removeprefix("eagle3-") for name in EXPERIMENTS} >= wanted
