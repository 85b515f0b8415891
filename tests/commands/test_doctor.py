"""``specdraft doctor`` from a checkpoint to its report."""

from functools import partial

import pytest
import torch

from specdraft.commands.doctor import main
from specdraft.drafters.checkpoint import about_target, save_drafter
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.export import export
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from tests.fakes import tiny_llama


@pytest.fixture
def doctor(called):
    """doctor(settings...) -> exit status, standard output, standard error."""
    return partial(called, main)


def test_a_checkpoint_names_its_target_and_faults_set_the_exit_status(doctor, tmp_path):
    tokenizer = train_tokenizer(["def add(a, b): return a + b"] * 9, 300, 96)
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_llama(300).save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), device="cpu")
    drafter = save_drafter(PromptLookup(), tmp_path / "drafter", target.identity)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    settings = [f"checkpoint={drafter}", f"traffic={tmp_path / 'prompts.jsonl'}", "max_new_tokens=16"]
    settings += ["target.device=cpu"]
    status, report, said = doctor(*settings)
    assert status == 0, said
    report = " ".join(report.split())
    assert "with the same weights" in report and "acceptance length" in report and "0 fault(s) in 5 checks" in report
    status, report, _ = doctor(*settings, "serving.max_model_len=1000", f"target.name={tmp_path / 'target'}")
    assert status == 0  # prompt lookup knows no longest context

    asked = '{"role": "user", "content": "def add(a, b):"}'
    (tmp_path / "prompts.jsonl").write_text(
        f'{{"messages": [{asked}, {{"role": "assistant", "content": "return a"}}]}}\n{{"messages": [{asked}]}}\n'
    )
    status, report, _ = doctor(*settings)
    assert status == 0 and "1 of 2 conversations end with an answer, which is left out" in " ".join(report.split())

    tiny_llama(300, seed=1).save_pretrained(tmp_path / "target")
    status, report, _ = doctor(*settings)
    assert status == 1 and "FAULT  target" in report and "1 fault(s)" in report


def test_the_target_may_be_one_of_conf(doctor, tmp_path):
    """As for evaluate and chat."""
    target = Target.load("embedded://tiny", device="cpu")
    drafter = save_drafter(PromptLookup(), tmp_path / "drafter", target.identity)
    status, report, said = doctor(f"checkpoint={drafter}", "target=tiny", "limit=1", "max_new_tokens=8")
    assert status == 0 and "trained for embedded://tiny with the same weights" in " ".join(report.split()), said


def test_a_quantized_export_is_compared_with_a_report_of_such_weights(doctor, tmp_path, monkeypatch):
    target = Target.load("embedded://tiny", device="cpu")
    head = Eagle3.for_target(target, torch.arange(0, target.vocab_size, 4))
    trained = save_drafter(head, tmp_path / "drafter", target.identity, {"target": about_target(target)})
    public = export(trained, VLLM(dtype="float32"), quantization="int8")
    asked = []
    monkeypatch.setattr("specdraft.doctor.drift.find_report", lambda *about: asked.append(about))
    _, report, said = doctor(f"checkpoint={public}", "target=tiny", "limit=1", "max_new_tokens=8")
    assert asked == [(public, None, "int8")] and "fault(s) in" in report, said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "checkpoint= is missing"),
        (["checkpoint=nowhere"], "there is no drafter checkpoint at nowhere"),
    ],
)
def test_bad_input(doctor, settings, said):
    status, _, error = doctor(*settings)
    assert status == 2 and said in error


def test_an_export_names_no_target(doctor, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    status, _, error = doctor(f"checkpoint={tmp_path}")
    assert status == 2 and "names no target: expected target=NAME or target.name=PATH" in error
