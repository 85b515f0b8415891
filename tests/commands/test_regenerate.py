"""``specdraft regenerate`` and the training that finds its answers take the same overrides."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from specdraft.commands.regenerate import CONF, main
from specdraft.targets import Target


@pytest.fixture
def overrides(target: Target, talks: Any, tmp_path: Path) -> list[str]:
    target.model.float().save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"messages": [dict(message) for message in talk.messages]} for talk in talks(60)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "def unheard_of():"}) + "\n")
    return [
        f"target.name={tmp_path / 'target'}",
        "data=messages",
        f"data.path={tmp_path / 'mine.jsonl'}",
        f"evaluation.benchmark={tmp_path / 'asked.jsonl'}",
        "data.source.held_out=0.2",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.limit=9",
        "data.validation_limit=3",
        "data.sequence_length=160",
        "data.max_new_tokens=4",
    ]


def test_training_finds_what_the_command_answered(
    overrides: list[str], engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    output = tmp_path / "answered.jsonl"
    monkeypatch.setattr(sys, "argv", ["regenerate", *overrides, f"output={output}"])
    main()
    said = capsys.readouterr().out
    assert "train: 9 conversations" in said and "validation: 3 conversations" in said and str(output) in said
    cut = [int(number) for number in re.findall(r"(\d+) end at an answer that was cut", said)]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert cut == [sum("cut" in row for row in rows if row["split"] == split) for split in ("train", "validation")]
    assert sum(cut) > 0
    assert [row["split"] for row in rows] == ["train"] * 9 + ["validation"] * 3
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert not any("people's own words" in m["content"] for m in row["messages"] if m["role"] == "assistant")
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("train", overrides=[*overrides, "generator=in_process"])
    data = instantiate(config.data)
    data.prepare(Target.load(str(tmp_path / "target")), engine)
    assert not engine.asked and engine.closed
    assert data.about("train")["left_out"] == 0 and data.about("train")["supervised_tokens"] > 0


def test_what_cannot_be_done_is_said_in_a_sentence(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for option, message in (
        ("data.regenerate=false", "data.regenerate is false"),
        ("generator=elsewhere", "unknown generator 'elsewhere': expected one of in_process, server, vllm"),
    ):
        monkeypatch.setattr(sys, "argv", ["regenerate", *overrides, option])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err
