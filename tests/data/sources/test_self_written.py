"""Conversations whose questions the target has yet to write."""

from collections import Counter
from pathlib import Path

import pytest

from specdraft.data.sources.conversations import Conversations
from specdraft.data.sources.mixture import Mixture
from specdraft.data.sources.self_written import SelfWritten, brief_of, is_self_written
from specdraft.errors import UserError
from tests.data.written import chat, write


def test_a_smaller_limit_takes_a_prefix_and_splits_share_no_seed() -> None:
    source = SelfWritten(turns=2, topics=("math", None))
    found = source.conversations("train", 40)
    assert list(source.conversations("train", 10)) == found[:10]
    assert source.conversations("train", 10).fingerprint != source.conversations("validation", 10).fingerprint
    both = [*found, *source.conversations("validation", 40)]
    briefs = [brief_of(message) for conversation in both for message in conversation.messages]
    names = [brief["name"] for brief in briefs if brief is not None]
    assert len(names) == len(set(names)) == 160
    assert all(is_self_written(conversation) and len(conversation.messages) == 3 for conversation in found)


def test_a_later_run_goes_on_where_an_earlier_one_ended() -> None:
    whole = SelfWritten(topics=("math", None)).conversations("train", 40)
    assert [*SelfWritten(topics=("math", None), first=25).conversations("train", 15)] == whole[25:]


def test_a_conversation_is_by_one_topic_and_all_have_their_share() -> None:
    found = SelfWritten(turns=2, topics=("math", None, "code")).conversations("train", 300)
    topics = [{str((brief_of(message) or {}).get("system")) for message in c.messages[::2]} for c in found]
    assert all(len(topic) == 1 for topic in topics)
    shares = Counter(topic for (topic,) in topics)
    assert set(shares) == {"math", "None", "code"} and min(shares.values()) > 70


def test_what_decides_the_questions_decides_the_fingerprint() -> None:
    kinds = [
        SelfWritten(),
        SelfWritten(temperature=0.7),
        SelfWritten(max_question_tokens=9),
        SelfWritten(topics=("a",)),
    ]
    assert len({source.conversations("train", 5).fingerprint for source in kinds}) == len(kinds)


def test_there_is_no_end_so_that_a_limit_must_be_given() -> None:
    with pytest.raises(UserError, match=r"data=self has no end: expected data\.limit"):
        SelfWritten().conversations("train")


def test_settings_are_checked() -> None:
    for wrong in ({"turns": 0}, {"temperature": 0.0}, {"max_question_tokens": 0}):
        with pytest.raises(UserError, match="expected 1 or more of both, and a temperature above 0"):
            SelfWritten(**wrong)
    with pytest.raises(UserError, match=r"data\.source\.first is -1: expected a place, 0 or more"):
        SelfWritten(first=-1)
    with pytest.raises(UserError, match="expected a list of system prompts"):
        SelfWritten(topics="math")


def test_it_mixes_with_files(tmp_path: Path) -> None:
    many = Conversations(write(tmp_path / "many.jsonl", [chat(n) for n in range(100)]))
    mixture = Mixture({"many": many, "own": SelfWritten()}, {"many": 1, "own": 3})
    found = mixture.conversations("train", 40)
    assert sum(map(is_self_written, found)) == 30
    assert list(mixture.conversations("train", 20)) == found[:20]
