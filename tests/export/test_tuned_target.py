"""A tuned target as a model directory: the merged model itself, which drafters draft for as for any other."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.checkpoint import about_target, save_drafter
from specdraft.drafters.jacobi import Jacobi
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from tests.drafters.drafts import tokenizer_of
from tests.drafters.jacobi_forcing.conftest import trained
from tests.fakes import tiny_llama


@pytest.fixture
def run(tmp_path):
    """A target on disk and the checkpoint of adapters for it."""
    folder = tmp_path / "target"
    tiny_llama(eos_token_id=7).save_pretrained(folder)
    tokenizer_of(64).save_pretrained(folder)
    target = Target.load(str(folder), device="cpu", packed=False)
    drafter = trained(target)
    save_drafter(drafter, tmp_path / "run" / "drafter", target.identity, {"target": about_target(target)})
    return target, drafter, tmp_path / "run"


def test_the_directory_is_the_tuned_model(run):
    target, drafter, folder = run
    written = export(folder, VLLM())
    assert written == folder / "export-vllm"
    tuned, ids = drafter.tuned(target), torch.arange(9)[None]
    alone = AutoModelForCausalLM.from_pretrained(written)
    torch.testing.assert_close(alone(ids).logits, tuned.model(ids).logits)
    again = Target.load(str(written), device="cpu")
    assert again.tokenizer.vocab_size == 64 and again.eos_token_ids == {7}
    prompt = [3, 9, 4]
    expected = Decoder(tuned).generate(prompt, 30).tokens
    assert Decoder(again, Jacobi(), 4).generate(prompt, 30).tokens == expected
    card = (written / "README.md").read_text(encoding="utf-8")
    assert "It is another model" in card and f"target.name={written} drafter=jacobi" in card
    assert "\n## Serving" in card and "\n## Acceptance" in card and "mean KL" not in card


def test_the_card_says_what_was_measured(run):
    _, _, folder = run
    measured = '{"settings": {"tuning": {"greedy_agreement": 0.925, "divergence": 0.0625, "tokens": 40}}}'
    (folder / "evaluation.json").write_text(measured)
    card = " ".join((export(folder, VLLM()) / "README.md").read_text(encoding="utf-8").split())
    assert "it says 92.5 % after the same text; the mean KL from it is 0.062 nats (40 tokens)." in card


def test_weights_are_written_in_the_dtype_that_is_asked_for(run):
    _, _, folder = run
    written = export(folder, VLLM(dtype="bfloat16"))
    assert AutoModelForCausalLM.from_pretrained(written, dtype="auto").dtype == torch.bfloat16


def test_what_is_refused(run, tmp_path):
    _, _, folder = run
    with pytest.raises(UserError, match="expected export without hub="):
        export(folder, VLLM(), served_as="me/model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="written to a new or empty directory"):
        export(folder, VLLM(), tmp_path / "full")
    tiny_llama(seed=1).save_pretrained(tmp_path / "target")
    with pytest.raises(UserError, match="belongs to the target"):
        export(folder, VLLM(), tmp_path / "other")
    assert not (tmp_path / "other").exists()
