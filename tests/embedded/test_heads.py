"""A run's drafter becomes part of the package: its values rounded to bfloat16, its card whole."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.drafters.checkpoint import about_target, load_drafter, save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.embedded.heads import embed
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.evaluation.written import evaluation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    target = Target.from_model(LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=4, **shape)))
    head = Eagle3.for_target(target, torch.arange(0, 60, 2))
    extra = {
        "data": {"source": "embedded://smollm2-conversations", "regenerated": False, "train_tokens": 123456},
        "decoding": {"num_draft_tokens": 4},
        "training": {"max_steps": 20, "seed": 3, "step": 17, "live_acceptance_length": 2.345},
        "target": about_target(target),
    }
    save_drafter(head, tmp_path / "run" / "drafter", target.identity, extra)
    advice = [{"drafter": "eagle3", "sentence": "Draft 3 tokens.", "num_speculative_tokens": 3}]
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps(evaluation() | {"advice": advice}))
    (tmp_path / "run" / ".hydra").mkdir()
    settings = {"data": {"batch_size": 2, "sequence_length": 512}, "trainer": {"accumulate_grad_batches": 4}}
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "run"


def test_the_values_are_rounded_and_the_card_says_how_they_were_made(run: Path, tmp_path: Path) -> None:
    directory = embed(run, tmp_path / "small_head", "python train.py seed=3")
    assert sorted(path.name for path in directory.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    (original, config), (found, copied) = load_drafter(run), load_drafter(directory)
    assert config["extra"]["decoding"] == {"num_draft_tokens": 4}
    assert copied["extra"]["decoding"] == {"num_draft_tokens": 3}
    assert config["extra"] | {"decoding": None} == copied["extra"] | {"decoding": None}
    assert config["drafter"] == copied["drafter"] and config["target"] == copied["target"]
    rounded = found.state_dict()
    for name, tensor in original.state_dict().items():
        expected = tensor.to(torch.bfloat16).to(tensor.dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(rounded[name], expected), name
    assert any((tensor != rounded[name]).any() for name, tensor in original.state_dict().items())
    card = (directory / "README.md").read_text()
    for said in (
        "# small-head",
        "python train.py seed=3",
        "123,456 tokens",
        "17 steps of 8 sequence(s) of 512",
        "2.35",
    ):
        assert said in card, said
    assert config["target"]["weights_hash"][:16] in card and "| eagle3 | 0 |" in card


def test_what_is_too_large_or_unmeasured_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bytes in bfloat16: expected at most 1,000"):
        embed(run, tmp_path / "head", "", limit=1000)
    (run / "evaluation.json").unlink()
    with pytest.raises(UserError, match=r"evaluation\.json does not exist"):
        embed(run, tmp_path / "head", "")
    assert not (tmp_path / "head").exists()


def test_a_later_evaluation_counts_if_it_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    measured = json.loads((run / "evaluation.json").read_text())
    measured["advice"][0] |= {"num_speculative_tokens": 2, "sentence": "Draft 2 tokens."}
    (tmp_path / "later" / "evaluation.json").write_text(json.dumps(measured))
    directory = embed(run, tmp_path / "head", "", evaluation=tmp_path / "later")
    assert load_drafter(directory)[1]["extra"]["decoding"] == {"num_draft_tokens": 2}
    assert "Draft 2 tokens." in (directory / "README.md").read_text()
