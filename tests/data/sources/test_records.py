"""Files of every kind, folders and data sets by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from specdraft.data.sources.conversations import Conversations
from specdraft.errors import UserError
from tests.data.written import chat, everything, write


def test_every_kind_of_file_holds_the_same(tmp_path: Path) -> None:
    records = [chat(n) for n in range(60)]
    write(tmp_path / "a.jsonl", records)
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(records), encoding="utf-8")
    Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "1.jsonl", records[:30])
    write(folder / "2.json", records[30:])
    expected = [c.messages for c in everything(Conversations(str(tmp_path / "a.jsonl")))]
    for name in ("a.json", "a.parquet", "folder"):
        assert [c.messages for c in everything(Conversations(str(tmp_path / name)))] == expected, name
    assert everything(Conversations(str(tmp_path / "a.parquet")))[0].id.startswith(f"{tmp_path}/a.parquet#")


@pytest.mark.parametrize("streaming", [False, True])
def test_data_sets_by_name(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    asked = []

    def load(name: str, subset: str | None, split: str, streaming: bool) -> Any:
        asked.append((name, subset, split, streaming))
        data = Dataset.from_list([chat(n) for n in range(60)])
        return data.to_iterable_dataset() if streaming else data

    monkeypatch.setattr("datasets.load_dataset", load)
    source = Conversations("people/talks", subset="en", dataset_split="sft", streaming=streaming, max_rows=50)
    assert len(everything(source)) == 50
    assert set(asked) == {("people/talks", "en", "sft", streaming)}
    assert source.conversations("train")[0].id.startswith("people/talks/sft#")


def test_a_data_set_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(UserError, match=r"people/talks \(default, train\) cannot be loaded \(no network here\)"):
        Conversations("people/talks").conversations("train")
