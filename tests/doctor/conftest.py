"""A trained head as its run leaves it, and as an export into which one fault is planted."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdraft.data.packing import pack
from specdraft.data.prompts import Prompt, encode
from specdraft.data.tokenization.chat import Example
from specdraft.decoding.decoder import Decoder
from specdraft.doctor import Finding, LoadedDrafter, Serving, run_checks
from specdraft.drafters.checkpoint import about_target, save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from tests.doctor.common import LAYERS, QUESTIONS, VOCAB
from tests.fakes import tiny_llama


@pytest.fixture(scope="session")
def target() -> Target:
    tokenizer = train_tokenizer(QUESTIONS, VOCAB, 256)
    options = {"num_hidden_layers": 8, "initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": 0}
    model = tiny_llama(VOCAB, 256, **options)
    model.lm_head.weight.data.mul_(4)  # a peaked distribution: it can be read from the hidden states alone
    return Target.from_model(model, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    return [Prompt(str(i), "code", ({"role": "user", "content": text},)) for i, text in enumerate(QUESTIONS)]


@pytest.fixture(scope="session")
def run(target, prompts, tmp_path_factory) -> Path:
    """A head that has learned the target's answers."""
    return train(target, prompts, tmp_path_factory.mktemp("trained"), steps=200, rate=1e-2)


@pytest.fixture(scope="session")
def hardly_trained(target, prompts, tmp_path_factory) -> Path:
    """A head of two steps, which happens to predict better without the norm that it was trained with."""
    return train(target, prompts, tmp_path_factory.mktemp("hardly"), steps=2, rate=3e-2, norm_output=True)


def train(target: Target, prompts: list[Prompt], folder: Path, steps: int, rate: float, **options: Any) -> Path:
    """A run in ``folder``, its head trained on the target's answers."""
    ids = [encode(target.tokenizer, prompt.opening) for prompt in prompts]
    said = [generation.tokens for generation in Decoder(target).generate_batch(ids, 32, batch_size=8)]
    pairs = zip(ids, said, strict=True)
    batch, _ = pack([Example([*p, *r], [False] * len(p) + [True] * len(r)) for p, r in pairs], 128)
    counts = torch.bincount(torch.tensor([token for answer in said for token in answer]), minlength=VOCAB)
    vocabulary = counts.argsort(descending=True)[:200].sort().values
    torch.manual_seed(0)
    head = Eagle3.for_target(target, vocabulary, layers=LAYERS, ttt_steps=2, **options)
    optimizer = torch.optim.Adam(head.parameters(), rate)
    with torch.no_grad():
        features = target.features(batch.input_ids, batch.position_ids, LAYERS)
    for _ in range(steps):
        optimizer.zero_grad()
        head.training_loss(batch, features, target).loss.backward()
        optimizer.step()
    extra = {
        "data": {"sequence_length": 128, "train_coverage": 1.0},
        "decoding": {"num_draft_tokens": 3},
        "target": about_target(target),
    }
    save_drafter(head, folder / "drafter", target.identity, extra)
    return folder


@pytest.fixture
def found(target, prompts, run, tmp_path) -> Callable[..., dict[str, Finding]]:
    """found(config, tensors, serving...) -> findings of an export whose config.json is updated with ``config`` and
    whose tensors are edited by ``tensors``."""

    def check(
        config: dict[str, Any] | None = None, tensors: Callable | None = None, **serving: Any
    ) -> dict[str, Finding]:
        folder = tmp_path / "served"
        shutil.rmtree(folder, ignore_errors=True)
        export(run, VLLM("float32"), folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | (config or {})))
        if tensors is not None:
            edited = load_file(folder / "model.safetensors")
            tensors(edited)
            save_file(edited, folder / "model.safetensors")
        return run_checks(LoadedDrafter.load(folder, target), prompts, Serving(**serving), 32)

    return check


@pytest.fixture
def plain(target, monkeypatch) -> Target:
    """The target, its tokenizer without a chat template."""
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    return target
