import sys
from types import SimpleNamespace

import pytest

from specdraft.training.callbacks.progress import ProgressBar, ProgressLines, progress


@pytest.mark.parametrize(("terminal", "kind"), [(True, ProgressBar), (False, ProgressLines)])
def test_a_terminal_has_a_bar_and_a_file_has_lines(monkeypatch, terminal, kind):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert type(progress()) is kind


def test_a_line_has_the_numbers_of_a_logged_step(capsys):
    lines = ProgressLines()
    trainer = SimpleNamespace(global_step=0, max_steps=5, is_global_zero=True, log_every_n_steps=2)
    trainer.callback_metrics = {"train/loss": 1.23456, "train/tokens_per_second": 12345.6, "other": 7.0}
    lines.on_train_start(trainer, None)
    for trainer.global_step in range(6):
        lines.on_train_batch_start(trainer, None, None, 0)
    lines.on_train_end(trainer, None)
    said = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:3] for line in said] == [
        [f"step {step}/5", "loss 1.235", "tokens/s 12,346"] for step in (2, 4, 5)
    ]
