"""What is checked, and the report on it."""

import pytest

from specdraft.doctor import LoadedDrafter, Serving, report, run_checks
from specdraft.doctor.checks import is_checkpoint
from specdraft.drafters.checkpoint import save_drafter
from specdraft.errors import UserError
from tests.doctor.common import faults
from tests.drafters.jacobi_forcing.conftest import trained


def test_a_sound_head_has_no_faults(target, prompts, run, found):
    loaded = LoadedDrafter.load(run, target)
    before = {name: value.clone() for name, value in loaded.drafter.state_dict().items()}
    norm = loaded.drafter.norm_output
    findings = run_checks(loaded, prompts, max_new_tokens=32)
    text = report(findings)
    assert faults(findings) == set(), text
    assert "0 fault(s)" in text and "with the same weights" in text
    assert loaded.drafter.norm_output is norm
    assert all(value.equal(before[name]) for name, value in loaded.drafter.state_dict().items())

    exported = found()
    assert faults(exported) == set()
    assert {"layers", "norm", "rope", "d2t", "draft vocabulary", "context length", "rounding"} <= set(exported)


def test_the_report_puts_faults_last(target, prompts, run):
    findings = run_checks(LoadedDrafter.load(run, target), prompts, Serving(max_model_len=1000), 32)
    text = report(findings)
    levels = [line.split()[0] for line in text.splitlines() if line[:1].strip()][:-1]
    assert levels[-1] == "FAULT" and levels.count("FAULT") == 1 and levels[0] == "ok"
    assert all(len(line) <= 110 for line in text.splitlines())


def test_what_the_checkpoint_records(target, run):
    loaded = LoadedDrafter.load(run, target)
    assert is_checkpoint(run) and loaded.recorded("decoding", "num_draft_tokens") == 3
    assert loaded.recorded("training", "live_acceptance_length") is None
    assert loaded.served_dtype(Serving()) == "bfloat16" and loaded.served_dtype(Serving(dtype="float16")) == "float16"


def test_a_drafter_that_tunes_its_target_is_refused(target, tmp_path):
    save_drafter(trained(target), tmp_path / "drafter", target.identity)
    with pytest.raises(UserError, match="tunes its target, which the doctor takes as it is"):
        LoadedDrafter.load(tmp_path, target)


def test_neither_a_checkpoint_nor_an_export(target, tmp_path):
    with pytest.raises(UserError, match="no drafter checkpoint"):
        LoadedDrafter.load(tmp_path, target)
