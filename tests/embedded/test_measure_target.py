"""What the model card says is measured."""

import math

import pytest
import torch

from specdraft.data.sources.prompts import Prompt
from specdraft.embedded import measure_target
from specdraft.embedded.measure_target import distinctness, held_out_loss, write_card
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.targets import Target
from tests.embedded.common import SOURCE
from tests.fakes import tiny_llama


@pytest.fixture
def target(monkeypatch):
    tokenizer = train_tokenizer([SOURCE] * 50, vocab_size=300, context=256)
    prompts = [Prompt(str(i), "function", ({"role": "user", "content": f"def f{i}():"},)) for i in range(3)]
    monkeypatch.setattr(measure_target, "load_prompts", lambda name, limit: prompts)
    monkeypatch.setattr(measure_target, "NEW_TOKENS", 24)
    return Target.from_model(tiny_llama(300, 256), tokenizer=tokenizer)


def test_the_held_out_loss_is_that_of_transformers(target):
    docs = [[1, 5, 9, 200, 7, 31], [2], [8, 4, 250]]
    total = 0.0
    for ids in (docs[0], docs[2]):  # one token alone predicts nothing
        tokens = torch.tensor([ids])
        total += float(target.model(tokens, labels=tokens).loss) * (len(ids) - 1)
    assert held_out_loss(target, docs) == pytest.approx(total / 7, rel=1e-5)


def test_greedy_answers_repeat_themselves_more_than_sampled_ones(target):
    assert 0 < distinctness(target, 0.0) < distinctness(target, 1.0) <= 1


def test_the_card(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Target, "load", lambda *args, **kwargs: target)
    monkeypatch.setattr(measure_target, "documents", lambda tokenizer, split: {"library": [[1, 5, 9]], "tests": []})
    loss = held_out_loss(target, [[1, 5, 9]])
    write_card(tmp_path, steps=1020)
    card = (tmp_path / "README.md").read_text()
    assert f"| library | {loss:.3f} | {math.exp(loss):.1f} |" in card and "tests |" not in card
    assert "for 1,020 steps of 8,192 tokens on Python's own standard library" in card
    assert card.count("| temperature ") == 3 and capsys.readouterr().out.strip() == card.strip()
