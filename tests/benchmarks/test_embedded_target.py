"""The card of a target says what was measured."""

import math
import shutil

import pytest
import torch

import embedded_target
from specdraft.targets import Target
from specdraft.targets.loading import location
from tests.fakes import tiny_llama


def test_the_loss_is_a_mean_over_tokens():
    model = tiny_llama(vocab_size=64)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    target = Target.from_model(model)
    documents = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    assert embedded_target.held_out_loss(target, documents) == pytest.approx(math.log(64))


def test_the_card_has_every_figure(tmp_path, monkeypatch, capsys):
    shutil.copytree(location("embedded://tiny"), tmp_path / "target")
    documents = {"library": [[0, *range(10, 40)]], "chat": [[0, *range(40, 60)]], "tests": []}
    monkeypatch.setattr(embedded_target, "documents", lambda tokenizer, split: documents)
    monkeypatch.setattr(embedded_target, "PROMPTS", 1)
    monkeypatch.setattr(embedded_target, "NEW_TOKENS", 8)
    embedded_target.write_card(tmp_path / "target", steps=7)
    card = (tmp_path / "target" / "README.md").read_text()
    assert capsys.readouterr().out.rstrip() == card.rstrip()
    assert "11.3M parameters" in card and "for 7 steps" in card
    assert "| library | " in card and "| chat | " in card and "| tests | " not in card
    assert all(f"| temperature {temperature} | " in card for temperature in ("0", "0.8", "1"))
