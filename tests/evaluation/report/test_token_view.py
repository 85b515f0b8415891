"""Colored text: every segment in its own tag, nothing in it can break a page."""

import re

import pytest

from specdraft.decoding.trace import ACCEPTED, CORRECTED, OWN, REJECTED, Segment
from specdraft.evaluation.report.token_view import drafted_share, page


def answer(*segments: Segment) -> str:
    whole = page(segments)
    assert whole.startswith("<!doctype html><html>") and whole.endswith("</pre></body></html>")
    assert "http" not in whole and "<script" not in whole and "prefers-color-scheme: dark" in whole
    for tag in "usbi":  # the key shows each
        assert re.search(rf"<p .*<{tag}>", whole)
    return whole.split('<pre class="sample">')[1].removesuffix("</pre></body></html>")


def test_marks_do_not_depend_on_color():
    html = answer(Segment("  a<b", ACCEPTED), Segment("c&", REJECTED), Segment("d", CORRECTED), Segment("\n", OWN))
    assert html == "  <u>a&lt;b</u><s>c&amp;</s><b>d</b><i>\n</i>"


def test_without_its_rejected_drafts_the_page_shows_the_answer():
    html = answer(
        Segment("if", OWN), Segment("  not\n    x", REJECTED), Segment("\n\n a", ACCEPTED), Segment(" b", CORRECTED)
    )
    shown = re.sub(r"<s>.*?</s>", "", html, flags=re.DOTALL)
    assert re.sub(r"<.+?>", "", shown) == "if\n\n a b"


def test_the_drafted_share_leaves_rejected_drafts_out():
    recorded = [("abc", ACCEPTED), ("rejected", REJECTED), ("d", CORRECTED), ("", OWN)]
    assert drafted_share([{"text": text, "status": status} for text, status in recorded]) == pytest.approx(3 / 4)
    assert drafted_share([]) == 0
