"""The recipe learns, resumes where it was, and describes the target that ships."""

import pytest
import torch

from specdraft.data.sources import stdlib
from specdraft.embedded import recipe
from specdraft.embedded.recipe import PEAK_LR, config, learning_rate, train
from specdraft.targets import Target
from tests.fakes import tiny_llama


def test_the_learning_rate_warms_up_stays_and_falls():
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert rates[0] < rates[30] < rates[59] == PEAK_LR == rates[640]
    assert rates[650:] == sorted(rates[650:], reverse=True) and rates[-1] == pytest.approx(0.02 * PEAK_LR)


def test_a_run_writes_the_target_and_goes_on_where_it_was(source, tmp_path, monkeypatch):
    files = [f"module_{index}.py" for index in range(60)] + [f"test/test_{index}.py" for index in range(4)]
    monkeypatch.setattr(stdlib, "files", lambda: files)
    monkeypatch.setattr(stdlib, "read", lambda path: f"# {path}\n{source * 4}")
    monkeypatch.setattr(recipe, "VOCAB", 300)
    monkeypatch.setattr(recipe, "config", lambda tokenizer: tiny_llama(300, 1024).config)
    monkeypatch.setattr(recipe, "BATCH", 2)
    out = tmp_path / "target"
    train(out, steps=2, compile_model=False)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 2
    written = Target.load(str(out), dtype="float32", device="cpu")
    assert written.vocab_size == 300 and written.tokenizer.chat_template
    embedding = written.model.get_input_embeddings().weight
    assert torch.equal(embedding, state["model"]["model.embed_tokens.weight"].bfloat16().float())
    train(out, steps=3, compile_model=False)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.pt", "target"]


def test_the_target_that_ships_is_what_the_recipe_builds():
    target = Target.load("embedded://tiny", dtype="float32")
    expected = config(target.tokenizer)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "head_dim"):
        assert getattr(target.config, name) == getattr(expected, name)
    assert target.eos_token_ids == {target.tokenizer.eos_token_id}


def test_the_target_that_ships_is_a_language_model():
    target = Target.load("embedded://tiny", dtype="float32")
    ids = torch.tensor([target.tokenizer("    def __init__(self, name):\n        self.name = name\n")["input_ids"]])
    features = target.features(ids, torch.arange(ids.shape[1])[None], ())
    loss = torch.nn.functional.cross_entropy(target.logits(features.last[0, :-1]), ids[0, 1:])
    assert loss < 2.0, "a uniform guess would cost log(4096) = 8.3 nats"
