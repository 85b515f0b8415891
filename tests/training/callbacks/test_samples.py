import re

import pytest

from specdraft.decoding.trace import Round, Trace
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.callbacks.samples import answer_html
from specdraft.training.summary import summary


class Letters:
    """Token 0 is "a", token 26 a character that would be markup."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join("<" if token == 26 else chr(97 + token) for token in ids)


def test_every_token_is_shown_once_by_its_fate():
    trace = Trace([0], 1, [Round([2, 3, 4], 1, 26), Round([5, 6], 2, 7), Round([], 0, 8)])
    page = answer_html(trace, len(trace.tokens), Letters())
    body = page.split('<pre class="sample">')[1]
    assert body == "<i>b</i><u>c</u><s>de</s><b>&lt;</b><u>fg</u><i>h</i><i>i</i></pre></body></html>"
    kept = re.sub("<s>.*?</s>|<[^>]*>", "", body)
    assert kept.replace("&lt;", "<") == Letters().decode(trace.tokens)
    assert "<u>c</u><s>de</s><b>&lt;</b></pre>" in answer_html(trace, 3, Letters())  # cut where the answer is
    assert "<i>1 </i></pre>" in answer_html(Trace([0], 1), 1, None)


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
