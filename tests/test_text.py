import hashlib
import json
from pathlib import Path

from specdraft.text import counted, file_fingerprint, fingerprint, reason, shorten


def test_fingerprints_are_of_bytes_or_of_the_json_of_a_value(tmp_path: Path) -> None:
    expected = hashlib.sha256(b"abc").hexdigest()
    (tmp_path / "file").write_bytes(b"abc")
    assert fingerprint(b"abc") == file_fingerprint(tmp_path / "file") == expected[:16]
    assert fingerprint(b"abc", 24) == expected[:24]
    assert fingerprint({"b": 1, "a": [2]}) == fingerprint(json.dumps({"a": [2], "b": 1}).encode())
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})


def test_reasons_are_one_line_and_values_are_shortened() -> None:
    assert reason(ValueError("no\n  such thing")) == "no such thing"
    assert reason(KeyError()) == "KeyError"
    assert reason("x" * 500, 10) == "x" * 10
    assert reason("no compiler\n\nSet TORCHDYNAMO_VERBOSE=1 for the trace") == "no compiler"
    assert shorten([1, 2]) == "[1, 2]"
    assert shorten("x" * 61) == "x" * 57 + "..."


def test_one_thing_is_no_plural() -> None:
    assert [counted(number, "prompt") for number in (0, 1, 2000)] == ["0 prompts", "1 prompt", "2,000 prompts"]
