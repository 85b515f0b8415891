import re

from specdraft.decoding.trace import Round, Trace
from specdraft.training.callbacks.samples import sample_row


class Letters:
    """Token 0 is "a", token 26 a character that would be markup."""

    def decode(self, ids, **options):
        return "".join("<" if token == 26 else chr(97 + token) for token in ids)


def test_every_token_is_shown_once_by_its_fate():
    trace = Trace([0], 1, [Round([2, 3, 4], 1, 26), Round([5, 6], 2, 7), Round([], 0, 8)])
    category, prompt, page, accepted = sample_row("method", trace, len(trace.tokens), Letters())
    assert (category, prompt, accepted) == ("method", "a", 2.0)
    body = page.split('<pre class="sample">')[1]
    assert body == "<span>b</span><u>c</u><s>de</s><b>&lt;</b><u>fg</u><i>h</i><span>i</span></pre></body></html>"
    kept = re.sub("<s>.*?</s>|<[^>]*>", "", body)
    assert kept.replace("&lt;", "<") == Letters().decode(trace.tokens)
    assert "<u>c</u><s>de</s><b>&lt;</b></pre>" in sample_row("", trace, 3, Letters())[2]  # cut where the answer is
    _, prompt, page, accepted = sample_row("", Trace([0, 5], 1), 1, None)
    assert "<span>1 </span></pre>" in page and (prompt, accepted) == ("0 5", None)
