"""Conversations become part of the package and are read from it as from any file."""

import json
from pathlib import Path

import pytest

from specdraft.data.sources.base import SPLITS
from specdraft.data.sources.conversations import Conversations
from specdraft.data.sources.records import read_records
from specdraft.embedded.conversations import embed
from specdraft.errors import UserError
from tests.data.written import chat


def test_they_are_read_again_as_they_were(tmp_path: Path) -> None:
    records = [chat(number) | {"id": str(number), "split": "train"} for number in range(70)]
    records[3]["cut"] = True
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    directory = embed([str(file)], tmp_path / "some", "specdraft regenerate data=self")
    assert sorted(path.name for path in directory.iterdir()) == ["README.md", "conversations.parquet"]
    found, expected = (
        sorted(
            (str(each.messages), each.cut) for split in SPLITS for each in Conversations(str(path)).conversations(split)
        )
        for path in (directory, file)
    )
    assert found == expected and len(found) == 70
    card = (directory / "README.md").read_text()
    assert "70 conversations" in card and "; 1 were cut" in card and "specdraft regenerate data=self" in card


def test_more_are_added_to_those_that_are_there_and_no_question_comes_twice(tmp_path: Path) -> None:
    first, more = tmp_path / "first.jsonl", tmp_path / "more.jsonl"
    first.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(5)))
    more.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(3, 9)))
    directory = embed([str(first)], tmp_path / "some", "")
    before = [record.fields["messages"] for record in read_records(str(directory), None, "train", False)]
    embed([str(directory / "conversations.parquet"), str(more)], directory, "")
    after = [record.fields["messages"] for record in read_records(str(directory), None, "train", False)]
    assert after[:5] == before and len(after) == 9
    assert "9 conversations" in (directory / "README.md").read_text()


@pytest.mark.parametrize(("text", "said"), [("", "is empty"), ('{"prompt": "a"}\n', ":1 is no conversation")])
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with pytest.raises(UserError, match="does not exist"):
        embed([str(file)], tmp_path / "some", "")
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        embed([str(file)], tmp_path / "some", "")
    assert not (tmp_path / "some").exists()
