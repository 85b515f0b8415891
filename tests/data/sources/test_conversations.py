import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from specdraft.data.datamodule import DataModule
from specdraft.data.sources.base import Conversation, PythonStdlib
from specdraft.data.sources.conversations import Conversations
from specdraft.data.sources.mixture import Mixture
from specdraft.errors import UserError

SPLITS = ("train", "validation", "test")
CONF = Path(__file__).parents[3] / "conf"


def chat(number: int, answer: str = "yes") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Is it {number}?"}, {"role": "assistant", "content": answer}]}


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def everything(source: Conversations) -> list[Conversation]:
    return [c for split in SPLITS for c in source.conversations(split)]


def one(folder: Path, row: dict[str, Any], form: str | None = None) -> Conversation:
    """The conversation of a row, whatever split it falls into."""
    source = Conversations(write(folder / "one.jsonl", [row]), form)
    for split in SPLITS:
        with suppress(UserError):
            return source.conversations(split)[0]
    raise AssertionError("the row is in no split")


USER = {"role": "user", "content": "ask"}
SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": [SYSTEM, USER, {"role": "assistant", "content": "say"}]}, [SYSTEM, USER]),
        ({"conversations": [USER, {"role": "assistant", "content": "say"}]}, [USER]),
        ({"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]}, [USER]),
        (
            {
                "system": "be kind",
                "conversations": [{"from": "user", "value": "ask"}, {"from": "bing", "value": "say"}],
            },
            [SYSTEM, USER],
        ),
        ({"prompt": "ask", "response": "say"}, [USER]),
        ({"question": "ask", "answer": "say", "system": "be kind"}, [SYSTEM, USER]),
        ({"instruction": "ask", "input": "", "output": "say"}, [USER]),
        ({"instruction": "ask", "input": "this", "output": "say"}, [{"role": "user", "content": "ask\n\nthis"}]),
        ({"text": "say"}, []),
    ],
)
def test_forms_are_recognized(tmp_path: Path, row: dict[str, Any], prompt: list[dict[str, str]]) -> None:
    found = one(tmp_path, row)
    assert list(found.prompt_messages) == prompt
    assert found.response == "say"
    assert found.id == f"{tmp_path / 'one.jsonl'}:1"


def test_tool_turns_reasoning_and_text_parts_are_kept(tmp_path: Path) -> None:
    call = [{"type": "function", "function": {"name": "sum", "arguments": {"of": [1, 2]}}}]
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "3", "tool_call_id": "a", "name": "sum"},
        {"role": "assistant", "content": "It is 3.", "reasoning_content": "the tool says so"},
    ]
    found = one(tmp_path, {"messages": turns, "tools": json.dumps(tools)})
    assert found.prompt_messages == (
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": call},
        turns[2],
    )
    assert found.response == "It is 3."
    assert found.messages[-1] == turns[3]
    assert found.tools == tuple(tools)
    observed = {"conversations": [{"from": role, "value": role} for role in ("human", "gpt", "observation", "gpt")]}
    assert [m["role"] for m in one(tmp_path, observed).messages] == ["user", "assistant", "tool", "assistant"]


def test_a_chat_reaches_from_the_first_question_to_the_last_answer(tmp_path: Path) -> None:
    turns = [("gpt", "left over"), ("human", "ask"), ("gpt", "say"), ("human", "more"), ("gpt", "end"), ("human", "?")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    assert [m["content"] for m in one(tmp_path, row).messages] == ["ask", "say", "more", "end"]
    open_end = one(tmp_path, {"messages": [SYSTEM, USER]})
    assert (open_end.messages, open_end.response) == ((SYSTEM, USER), None)


def test_malformed_rows_are_named_and_skipped_up_to_a_limit(tmp_path: Path) -> None:
    bad = ["{", "[1]", {"messages": []}, {"messages": [{"role": "robot", "content": "x"}]}, {"other": 1}]
    bad += [
        {"messages": [{"role": "assistant", "content": "x"}]},
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ]
    path = write(tmp_path / "some.jsonl", [chat(0), "", *bad, *(chat(n) for n in range(1, 60))])
    with pytest.warns(UserWarning, match="7 of 67 rows") as caught:
        assert len(everything(Conversations(path, max_malformed=7))) == 60
    assert len(caught) == 1
    reasons = {
        3: "not JSON",
        4: "not a JSON object",
        6: "a message has the role 'robot'",
        8: "nobody asks",
        9: "a text holds",
    }
    for line, reason in reasons.items():
        assert f"some.jsonl:{line} ({reason}" in str(caught[0].message)
    with pytest.raises(
        UserError, match=r"7 of 67 rows of .* are malformed, .* is 6: .* the first is .*:3 \(not JSON\)"
    ):
        Conversations(path, max_malformed=6).conversations("train")


SHARED = {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]}


@pytest.mark.parametrize(
    ("row", "form", "reason", "remedy"),
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
def test_rows_of_another_form_are_recognized(
    tmp_path: Path, row: dict[str, Any], form: str, reason: str, remedy: str
) -> None:
    path = write(tmp_path / "a.jsonl", [row] * 20)
    with pytest.raises(UserError, match=f"none of the 20 rows of .* form {form}: .*:1 .{reason}.*; the rows {remedy}$"):
        Conversations(path, form).conversations("train")
    fine = {"messages": chat, "sharegpt": lambda n: SHARED | {"system": str(n)}}[form]
    path = write(tmp_path / "b.jsonl", [*[row] * 20, *(fine(n) for n in range(15))])
    with pytest.raises(UserError, match=f"20 of 35 rows .* the first is .*:1 .{reason}.*; the rows {remedy}$"):
        Conversations(path, form, max_malformed=19).conversations("train")


def test_one_reason_is_given_once_and_without_our_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*[SHARED] * 25, *(chat(n) for n in range(20))])
    with pytest.warns(
        UserWarning, match=r"25 of 45 .*:1, .*:20 \(.*\) and 5 more; the rows look like sharegpt"
    ) as caught:
        Conversations(path, "messages").conversations("train")
    told = warnings.formatwarning(
        caught[0].message, caught[0].category, caught[0].filename, caught[0].lineno, caught[0].line
    )
    assert told.count("role None") == 1 and told.count("\n") == 1 and ".py" not in told


@pytest.mark.parametrize("form", [None, "messages"])
def test_empty_files_and_rows_of_no_form(tmp_path: Path, form: str | None) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl is empty: expected a row for each conversation"):
        Conversations(write(tmp_path / "a.jsonl", [""]), form).conversations("train")
    with pytest.raises(UserError, match=r"keys foo|none of the 1 rows .* \('messages' is no list of turns\)$"):
        Conversations(write(tmp_path / "b.jsonl", [{"foo": 1}]), form).conversations("train")


def test_unknown_forms_and_places_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.jsonl", [{"speech": "x"}])
    with pytest.raises(UserError, match=r"form of .* is unknown: its first rows have the keys speech"):
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
    rows = [chat(n) for n in range(400)]
    source = Conversations(write(tmp_path / "a.jsonl", rows))
    moved = Conversations(write(tmp_path / "b.jsonl", [*(chat(n) for n in range(400, 500)), *reversed(rows), *rows]))
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


def test_all_answers_to_a_question_are_on_one_side(tmp_path: Path) -> None:
    rows = [chat(n // 4, f"answer {n}") for n in range(400)]
    rows += [{"prompt": f"  is IT {n}?", "response": "spelt otherwise"} for n in range(100)]
    path = write(tmp_path / "a.jsonl", rows[:400])
    questions = [{c.prompt_messages[0]["content"] for c in Conversations(path).conversations(s)} for s in SPLITS]
    assert sum(map(len, questions)) == 100
    pairs = Conversations(write(tmp_path / "b.jsonl", rows[400:]))
    for split, asked in zip(SPLITS, questions, strict=True):
        spelt = {c.prompt_messages[0]["content"].lower().strip() for c in pairs.conversations(split)}
        assert spelt == {question.lower() for question in asked}


def test_every_kind_of_file_holds_the_same(tmp_path: Path) -> None:
    rows = [chat(n) for n in range(60)]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "1.jsonl", rows[:30])
    write(folder / "2.json", rows[30:])
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

    monkeypatch.setattr("specdraft.data.sources.records.load_dataset", load)
    source = Conversations("people/talks", subset="en", dataset_split="sft", streaming=streaming, max_rows=50)
    assert len(everything(source)) == 50
    assert set(asked) == {("people/talks", "en", "sft", streaming)}
    assert source.conversations("train")[0].id.startswith("people/talks/sft#")


def test_a_data_set_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr("specdraft.data.sources.records.load_dataset", fail)
    with pytest.raises(UserError, match=r"people/talks \(default, train\) cannot be loaded \(no network here\)"):
        Conversations("people/talks").conversations("train")


def test_mixtures_keep_their_proportions_in_every_prefix(tmp_path: Path, library: Path) -> None:
    many = Conversations(write(tmp_path / "many.jsonl", [chat(n) for n in range(300)]))
    code = PythonStdlib(root=str(library))
    mixture = Mixture({"many": many, "code": code}, {"many": 3, "code": 1})
    found = mixture.conversations("train")
    for size in (4, 40, 200):
        assert abs(sum(c.id.startswith("many:") for c in found[:size]) - 0.75 * size) <= 1
        assert list(mixture.conversations("train", size)) == found[:size]
    assert sum(c.id.startswith("many:") for c in found) == len(many.conversations("train"))  # the first to end
    assert len(found) < 1.4 * len(many.conversations("train"))
    assert mixture.name == f"75% {many.name} + 25% python-stdlib"
    with pytest.raises(UserError, match="a positive weight for each source"):
        Mixture({"many": many}, {"many": 0})


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


def test_the_shipped_mixture() -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("train", overrides=["data=mixture"])
        missing = compose("train", overrides=["data=messages"])
    assert instantiate(config.data).preparation.source.name == "75% HuggingFaceH4/ultrachat_200k + 25% python-stdlib"
    assert OmegaConf.is_missing(missing.data, "path")
