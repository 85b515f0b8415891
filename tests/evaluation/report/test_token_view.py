"""Colored text: every character of the answer once, by where it came from; nothing in it can break a page."""

import re

from specdraft.decoding.trace import ACCEPTED, CORRECTED, OWN, REJECTED, Round, Segment, Trace, segments
from specdraft.evaluation.report.token_view import colored


def test_segments_are_the_answer(tokenizer):
    ids = tokenizer("def add(a, b):\n    return a + b\n").input_ids
    wrong = tokenizer("xyz").input_ids
    trace = Trace(
        [1], ids[0], [Round([*ids[1:4], *wrong], 3, ids[4]), Round(wrong, 0, ids[5]), Round(ids[6:], len(ids) - 6, 0)]
    )
    found = segments(trace, len(ids), tokenizer)
    assert "".join(segment.text for segment in found if segment.status != REJECTED) == tokenizer.decode(ids)
    assert [segment.status for segment in found] == [OWN, ACCEPTED, REJECTED, CORRECTED, REJECTED, CORRECTED, ACCEPTED]
    assert {segment.text for segment in found if segment.status == REJECTED} == {"xyz"}
    assert len(segments(trace, 3, tokenizer)) == 2  # cut inside the first round: nothing behind the cut


def test_half_a_character_waits_for_its_other_half(tokenizer):
    ids = tokenizer("é€").input_ids
    assert len(ids) > 2  # bytes
    trace = Trace([1], ids[0], [Round(ids[1:], len(ids) - 1, 0)])
    assert "".join(segment.text for segment in segments(trace, len(ids), tokenizer)) == "é€"
    single = Trace([1], ids[0], [Round([], 0, token) for token in ids[1:]])
    assert "".join(segment.text for segment in segments(single, len(ids), tokenizer)) == "é€"


def test_marks_do_not_depend_on_color():
    html = colored([Segment("  a<b", ACCEPTED), Segment("c&", REJECTED), Segment("d", CORRECTED), Segment("\n", OWN)])
    assert html == '<pre class="sample">  <u>a&lt;b</u><s>c&amp;</s><b>d</b><i>\n</i></pre>'


def test_without_its_rejected_drafts_the_page_shows_the_answer():
    html = colored(
        [Segment("if", OWN), Segment("  not\n    x", REJECTED), Segment(" a", ACCEPTED), Segment(" b", CORRECTED)]
    )
    shown = re.sub(r"<s>.*?</s>", "", html, flags=re.DOTALL)
    assert re.sub(r"<.+?>", "", shown) == "if a b"


def test_a_long_text_is_shown_whole_however_it_is_cut(tokenizer):
    """Of a long text only the last tokens are decoded again."""
    ids = [*tokenizer("def add(a, b):\n    return a + b\n" * 40, add_special_tokens=False)["input_ids"]]
    ids += [*tokenizer("é€" * 60, add_special_tokens=False)["input_ids"]]
    rounds = [Round([*ids[at : at + 2], 5], 2, ids[at + 2]) for at in range(1, len(ids) - 3, 3)]
    trace, length = Trace([], ids[0], rounds), 1 + 3 * len(rounds)
    found = segments(trace, length, tokenizer)
    assert length > 400
    shown = "".join(segment.text for segment in found if segment.status != REJECTED)
    assert shown == tokenizer.decode(ids[:length], skip_special_tokens=True).rstrip("\ufffd")
