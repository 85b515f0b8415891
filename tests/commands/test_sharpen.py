"""``specdraft sharpen`` from a checkpoint to one that an engine's export takes."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from specdraft.commands.sharpen import main
from specdraft.drafters.checkpoint import load_drafter, save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.targets import Target
from tests.fakes import tiny_llama


@pytest.fixture
def sharpen(called):
    """sharpen(settings...) -> exit status, standard output, standard error."""
    return partial(called, main)


def test_a_drafter_is_written_anew(sharpen, tmp_path):
    train_tokenizer(["def add(a, b): return a + b"] * 9, 300, 96).save_pretrained(tmp_path / "target")
    tiny_llama(300, initializer_range=0.3, tie_word_embeddings=False).save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), device="cpu")
    draft = DraftModel.for_target(target, copy_layers=target.config.num_hidden_layers).requires_grad_(False)
    draft.language_model.head.weight.mul_(0.8)
    run = save_drafter(draft, tmp_path / "run" / "drafter", target.identity, {"data": {"source": "x"}}).parent
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n' * 4)
    settings = [f"prompts={tmp_path / 'prompts.jsonl'}", "max_new_tokens=16", "target.device=cpu"]
    status, said, error = sharpen(f"checkpoint={run}", f"output={tmp_path / 'sharp'}", *settings)
    assert status == 0, error
    assert "logits times 1.25: sampled tokens accepted, by position, 0." in said and "to 1.000 (" in said
    before, after = (load_file(folder / "model.safetensors") for folder in (run / "drafter", tmp_path / "sharp"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [name for name in before if "lm_head" in name]
    assert torch.allclose(after[changed[0]], before[changed[0]] * 1.25)
    extra = load_drafter(tmp_path / "sharp")[1]["extra"]
    assert extra["data"] == {"source": "x"} and extra["sharpness"]["factor"] == 1.25

    again = [f"checkpoint={tmp_path / 'sharp'}", f"output={tmp_path / 'again'}", "target.dtype=bfloat16"]
    status, said, error = sharpen(*again, *settings)
    assert "logits times 1:" in said, error  # and both factors are known
    assert json.loads((tmp_path / "again" / "config.json").read_text())["extra"]["sharpness"]["factor"] == 1.25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["checkpoint={run}"], "expected checkpoint=RUN, a run or a drafter, and output=DIR"),
        (["checkpoint={run}", "output={run}"], "exists: expected a new directory; choose one with output="),
        (["checkpoint={run}", "output={run}/new"], "the logits of prompt_lookup cannot be scaled: expected"),
        (["checkpoint={run}/no", "output={run}/new"], "no: expected"),
    ],
)
def test_bad_input(sharpen, tmp_path, settings, said):
    target = Target.load("embedded://tiny", device="cpu")
    save_drafter(PromptLookup(), tmp_path / "drafter", target.identity)
    status, _, error = sharpen(*(each.format(run=tmp_path) for each in settings))
    assert status != 0 and said in error and "Traceback" not in error
