import warnings
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from specdraft.data.datamodule import DataModule
from specdraft.data.sources.base import SPLITS
from specdraft.data.sources.conversations import Conversations
from specdraft.errors import UserError
from tests.data.written import chat, everything, messages, write

CONF = Path(__file__).parents[3] / "conf"


def test_malformed_records_are_named_and_skipped_up_to_a_limit(tmp_path: Path) -> None:
    bad = ["{", "[1]", {"messages": []}, {"messages": [{"role": "robot", "content": "x"}]}, {"other": 1}]
    bad += [
        {"messages": [{"role": "assistant", "content": "x"}]},
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ]
    path = write(tmp_path / "some.jsonl", [chat(0), "", *bad, *(chat(n) for n in range(1, 60))])
    with pytest.warns(UserWarning, match="7 of 67 records") as caught:
        assert len(everything(Conversations(path, max_malformed=7))) == 60
    assert len(caught) == 1
    reasons = {
        3: "not JSON",
        4: "not a JSON object",
        6: "a message has the role 'robot'",
        8: "there is no turn of the user",
        9: "a text holds",
    }
    for line, reason in reasons.items():
        assert f"some.jsonl:{line} ({reason}" in str(caught[0].message)
    with pytest.raises(
        UserError, match=r"7 of 67 records of .* are malformed, .* is 6: .* the first is .*:3 \(not JSON\)"
    ):
        Conversations(path, max_malformed=6).conversations("train")


SHARED = {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]}


@pytest.mark.parametrize(
    ("record", "form", "reason", "remedy"),
    [
        (SHARED, "messages", "a message has the role None", "look like sharegpt: use data=sharegpt"),
        (chat(1), "sharegpt", "'conversations' is no list", "look like messages: use data=messages"),
        (
            {"prompt": "ask", "response": "say"},
            "messages",
            "'messages' is no",
            "look like pair: use data=conversations",
        ),
    ],
)
def test_records_of_another_form_are_recognized(
    tmp_path: Path, record: dict[str, Any], form: str, reason: str, remedy: str
) -> None:
    path = write(tmp_path / "a.jsonl", [record] * 20)
    with pytest.raises(
        UserError, match=f"none of the 20 records of .* form {form}: .*:1 .{reason}.*; the records {remedy}$"
    ):
        Conversations(path, form).conversations("train")
    fine = {"messages": chat, "sharegpt": lambda n: SHARED | {"system": str(n)}}[form]
    path = write(tmp_path / "b.jsonl", [*[record] * 20, *(fine(n) for n in range(15))])
    with pytest.raises(UserError, match=f"20 of 35 records .* the first is .*:1 .{reason}.*; the records {remedy}$"):
        Conversations(path, form, max_malformed=19).conversations("train")


def test_one_reason_is_given_once_and_without_our_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*[SHARED] * 25, *(chat(n) for n in range(20))])
    with pytest.warns(
        UserWarning, match=r"25 of 45 .*:1, .*:20 \(.*\) and 5 more; the records look like sharegpt"
    ) as caught:
        Conversations(path, "messages").conversations("train")
    told = warnings.formatwarning(
        caught[0].message, caught[0].category, caught[0].filename, caught[0].lineno, caught[0].line
    )
    assert told.count("role None") == 1 and told.count("\n") == 1 and ".py" not in told


@pytest.mark.parametrize("form", [None, "messages"])
def test_empty_files_and_records_of_no_form(tmp_path: Path, form: str | None) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl is empty: expected a record for each conversation"):
        Conversations(write(tmp_path / "a.jsonl", [""]), form).conversations("train")
    with pytest.raises(UserError, match=r"keys foo|none of the 1 records .* \('messages' is no list of turns\)$"):
        Conversations(write(tmp_path / "b.jsonl", [{"foo": 1}]), form).conversations("train")


def test_unknown_forms_and_places_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.jsonl", [{"speech": "x"}])
    with pytest.raises(UserError, match=r"form of .* is unknown: its first records have the keys speech"):
        Conversations(path).conversations("train")
    with pytest.raises(UserError, match="'letter'"):
        Conversations(path, "letter")
    with pytest.raises(UserError, match="does not exist: check the path"):
        Conversations(str(tmp_path / "no.jsonl")).conversations("train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no data"):
        Conversations(str(tmp_path / "empty")).conversations("train")
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="no readable Parquet"):
        Conversations(str(tmp_path / "bad.parquet")).conversations("train")
    with pytest.raises(UserError, match="held_out=0"):
        Conversations(path, held_out=0)


def test_what_is_said_decides_the_split_and_the_order(tmp_path: Path) -> None:
    records = [chat(n) for n in range(400)]
    source = Conversations(write(tmp_path / "a.jsonl", records))
    moved = Conversations(
        write(tmp_path / "b.jsonl", [*(chat(n) for n in range(400, 500)), *reversed(records), *records])
    )
    before = {split: [c.messages for c in source.conversations(split)] for split in SPLITS}
    after = {split: [c.messages for c in moved.conversations(split)] for split in SPLITS}
    assert sum(map(len, before.values())) == 400
    assert sum(map(len, after.values())) == 500  # equal ones are there once
    old = {c for split in SPLITS for c in map(str, before[split])}
    for split in SPLITS:
        assert [m for m in after[split] if str(m) in old] == before[split]
    assert 8 <= len(before["validation"]) <= 32
    train = source.conversations("train")
    assert [c.id for c in train] != sorted((c.id for c in train), key=lambda i: int(i.split(":")[-1]))
    assert list(source.conversations("train", 7)) == train[:7]


def test_answers_that_were_cut_are_told_from_whole_ones(tmp_path: Path) -> None:
    records = [chat(1) | {"cut": True}, chat(1), *(chat(n) | {"cut": n % 3 == 0} for n in range(2, 80))]
    found = everything(Conversations(write(tmp_path / "some.jsonl", records)))
    assert sorted((each.prompt_messages[-1]["content"], each.cut) for each in found) == sorted(
        (str(record["messages"][-2]["content"]), bool(record.get("cut"))) for record in records
    )


def test_all_answers_to_a_question_are_on_one_side(tmp_path: Path) -> None:
    records = [chat(n // 4, f"answer {n}") for n in range(400)]
    records += [{"prompt": f"  is IT {n}?", "response": "spelt otherwise"} for n in range(100)]
    path = write(tmp_path / "a.jsonl", records[:400])
    questions = [{c.prompt_messages[0]["content"] for c in Conversations(path).conversations(s)} for s in SPLITS]
    assert sum(map(len, questions)) == 100
    pairs = Conversations(write(tmp_path / "b.jsonl", records[400:]))
    for split, asked in zip(SPLITS, questions, strict=True):
        spelt = {c.prompt_messages[0]["content"].lower().strip() for c in pairs.conversations(split)}
        assert spelt == {question.lower() for question in asked}


@pytest.mark.parametrize("name", ["conversations", "messages", "sharegpt", "ultrachat", "text"])
def test_shipped_configs_read_a_file_at_data_path(name: str, tmp_path: Path) -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("train", overrides=[f"data={name}", f"data.path={tmp_path}/a.jsonl"])
    data = instantiate(config.data)
    assert isinstance(data, DataModule)
    assert isinstance(data.preparation.source, Conversations)
    assert data.preparation.source.name == f"{tmp_path}/a.jsonl"
    forms = {"conversations": None, "ultrachat": "messages"}
    assert data.preparation.source.form == forms.get(name, name)
    assert data.preparation.regenerate == (name != "text")


def test_a_file_that_changes_under_the_hands_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [messages(n) for n in range(60)])
    found = Conversations(path).conversations("train")
    first = found[0]
    write(Path(path), [messages(n) for n in range(100, 160)])
    with pytest.raises(UserError, match=f"{first.id} changed while it was read"):
        found[0]


def test_a_limit_takes_the_same_conversations_whatever_else_is_read(tmp_path: Path) -> None:
    records = [messages(n) for n in range(200)]
    whole = list(Conversations(write(tmp_path / "a.jsonl", records)).conversations("train"))
    for limit in (1, 10, 1000):
        limited = Conversations(write(tmp_path / "b.jsonl", records[::-1] + records)).conversations("train", limit)
        assert [c.messages for c in limited] == [c.messages for c in whole[:limit]]
        assert len(limited) == min(limit, len(whole))
