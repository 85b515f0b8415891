"""The recipe's parts: the corpus keeps to its split, the tokenizer is lossless, the target that ships is whole."""

import random

import pytest
import torch

from specdraft.data.sources import stdlib
from specdraft.data.sources.base import SPLITS
from specdraft.embedded.corpus import LENGTH, documents, sequences
from specdraft.embedded.recipe import PEAK_LR, config, learning_rate
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.targets import Target

SOURCE = '''def add(a, b):
    """Add two numbers."""
    total = a + b
    return total
'''


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SOURCE] * 50, vocab_size=300, context=64)


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in (SOURCE, "\tx = 'äöü 漢字 \U0001f600'\r\n\n\n        return 12345678\n", "<|end|> as text"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_template_marks_the_answer_and_its_end(tokenizer):
    messages = [{"role": "user", "content": "def f():"}, {"role": "assistant", "content": "    return 1"}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    answer = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(answer) == "    return 1<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert encoded["input_ids"][: len(prompt)] == prompt


def test_documents_keep_to_their_split(tokenizer, monkeypatch):
    paths = [f"module_{index}.py" for index in range(60)] + ["test/test_all.py"]
    monkeypatch.setattr(stdlib, "files", lambda: paths)
    monkeypatch.setattr(stdlib, "read", lambda path: f"# {path}\n{SOURCE}")
    for split in SPLITS:
        kinds = documents(tokenizer, split)
        expected = [path for path in paths if stdlib.split_of(path) == split]
        texts = [tokenizer.decode(ids) for ids in kinds["library"] + kinds["tests"]]
        assert sorted(texts) == sorted(f"<|begin|># {path}\n{SOURCE}" for path in expected)
        assert len(kinds["chat"]) == len(expected)


def test_sequences_hold_whole_repeats_and_a_sample(monkeypatch):
    kinds = {"library": [[1] * LENGTH] * 4, "chat": [[2] * LENGTH] * 4}
    made = sequences(kinds, {"library": 1.5, "chat": 2.0}, random.Random(0))
    assert len(made) == 6 + 8 and all(len(sequence) == LENGTH for sequence in made)
    assert sum(sequence[0] == 1 for sequence in made) == 6


def test_the_learning_rate_warms_up_stays_and_falls():
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert rates[0] < rates[30] < rates[59] == PEAK_LR == rates[640]
    assert rates[650:] == sorted(rates[650:], reverse=True) and rates[-1] == pytest.approx(0.02 * PEAK_LR)


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
