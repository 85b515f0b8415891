import pytest
import torch

from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.medusa import Medusa
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.summary import explain_sizes, summary


class Trained:
    """The little that a summary reads of a module."""

    def __init__(self, values: dict[str, float], steps: int, tokens: float, seconds: float) -> None:
        self.first_values = self.last_values = values
        self.tokens, self.seconds = tokens, seconds
        self.trainer = type("Trainer", (), {"global_step": steps})


@pytest.mark.parametrize("drafted", [3, 25])
def test_a_long_training_fits_80_columns(tmp_path, drafted):
    values = {f"conditional_acceptance_rate_{place}": 0.5 for place in range(1, drafted)}  # the last was never reached
    values |= {"train/loss": 12345.678, "validation/loss": 1e5, "acceptance_length": 12.345, "cost_ratio": 0.051}
    values |= {"validation/teacher_forced_acceptance_length": 9.876, "predicted_speedup": 123.4}
    live = LiveAcceptance([[1]], tmp_path, num_draft_tokens=drafted)
    live.best, live.best_step = 12.345, 1_234_567
    text = summary(Trained(values, 1_234_567, 1e13, 2e6), live, 3_000_000.0)
    assert max(map(len, text.splitlines())) <= 80
    assert "1,234,567 steps in 833 h 20 min" in text and "5,000,000 tokens/s" in text
    assert "12.35 after step 1,234,567" in text or "12.34 after step 1,234,567" in text
    assert text.count("0.500") == drafted - 1 and text.rstrip().count("  -") >= 1


def test_a_training_without_a_logged_line_still_has_a_summary(tmp_path):
    text = summary(Trained({}, 1, 0.0, 0.0), LiveAcceptance([[1]], tmp_path), 59.6)
    assert text.splitlines()[0].endswith("1 steps in 1 min 00 s")


def test_sizes_are_explained(target, tmp_path):
    drafter = Medusa.for_target(target, num_heads=2)
    save_drafter(drafter, tmp_path / "drafter", target.identity)
    assert explain_sizes(tmp_path, drafter).endswith("nothing of the target")
    (tmp_path / "checkpoints" / "last.ckpt").mkdir(parents=True)
    (tmp_path / "checkpoints" / "last.ckpt" / "part.pt").write_bytes(b"1" * 120_000)
    parameters = 2 * (32 * 32 + 32 + 64 * 32)
    expected = f"0.03 MB: {parameters:,} parameters x 4 bytes, nothing of the target; last.ckpt 0.12 MB: with"
    assert explain_sizes(tmp_path, drafter).startswith(expected)
    for parameter in drafter.parameters():  # as ZeRO-3 leaves them
        parameter.ds_numel, parameter.data = parameter.numel(), torch.empty(0)
    assert explain_sizes(tmp_path, drafter).startswith(expected)
