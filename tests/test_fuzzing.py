"""Ten thousand mutated files, and rows of any JSON: a right answer or one sentence."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdraft.data.sources.chat_formats import CHAT_FORMATS, MalformedError, convert, recognize
from specdraft.errors import UserError
from specdraft.redaction import redact
from tests.fuzzed_readers import readers
from tests.fuzzing import Broken, Reader, fuzz, limits, outcome

torch.set_num_threads(1)
# Inputs by reader; the slow ones build modules of transformers.
INPUTS = {
    "prompts": 1500, "array": 600, "parquet": 600, **{f"conversations-{n}": 600 for n in range(5)},
    "drafter-medusa": 600, "drafter-hydra": 300, "drafter-eagle": 300, "drafter-eagle3": 300, "drafter-draft": 150,
    "drafter-tli": 150,
    "export": 450, "import": 300, "import-redrafter": 300, "import-medusa": 300, "import-eagle": 300,
    "import-mtp": 300, "import-draft": 150, "import-int8": 150, "import-int4": 300,
    "target-llama": 250, "target-qwen3_moe": 200, "index": 450,
    "store-float32": 500, "store-float8": 500,
}  # fmt: skip


@pytest.fixture(scope="module")
def by_name(tmp_path_factory) -> dict[str, Reader]:
    return {reader.name: reader for reader in readers(tmp_path_factory.mktemp("samples"))}


def test_there_are_ten_thousand_inputs_and_no_reader_is_left_out(by_name):
    assert sum(INPUTS.values()) >= 10_000
    assert by_name.keys() == INPUTS.keys()


@pytest.mark.parametrize("name", INPUTS)
def test_an_answer_or_a_sentence(by_name, tmp_path, name):
    found = fuzz(by_name[name], tmp_path, range(INPUTS[name]))
    assert found["answer"] and found["sentence"], f"mutations of {name} are all alike: {dict(found)}"


def hang() -> None:
    while True:
        pass


def foreign() -> None:
    raise KeyError("foreign")


def greedy() -> None:
    bytearray(2**31)


def two_lines() -> None:
    error = UserError("one")
    error.args = ("one\ntwo",)
    raise error


@pytest.mark.parametrize(
    ("read", "complaint"),
    [(hang, "more than 1 s"), (foreign, "KeyError"), (two_lines, "no sentence"), (greedy, "MemoryError")],
)
def test_the_property_can_be_broken(read, complaint, monkeypatch):
    monkeypatch.setattr("tests.fuzzing.SECONDS", 1)
    with limits(), pytest.raises(Broken, match=complaint):
        outcome(read)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "from", "value", "text", "user", "human", "a"]) | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
KEYS = ("messages", "conversations", "system", "tools", "prompt", "response", "instruction", "input", "output", "text")


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_rows_of_any_json(row):
    assert recognize(row) in (*CHAT_FORMATS, None)
    for form in CHAT_FORMATS:
        try:
            messages, document, _ = convert(row, form)
        except MalformedError:
            continue
        for text in [document or "", *(message["content"] for message in messages)]:
            text.encode()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(JSON)
def test_redaction_changes_no_shape(value):
    kept = redact({"api_key": "k" * 20, "rest": value})
    assert kept["api_key"] == "***"
    assert repr(kept["rest"]) == repr(value)


def test_samples_are_small(by_name):
    for reader in by_name.values():
        assert sum(path.stat().st_size for path in Path(reader.sample).rglob("*") if path.is_file()) < 2**20
