"""Secrets are known by the names of their settings and variables."""

from specdraft.redaction import literal_secrets, redact, redact_text

SECRET = "sk-0123456789abcdef"


def test_secrets_are_told_by_their_names(monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_TOKEN", SECRET)
    monkeypatch.setenv("SOME_KEY", "short")
    settings = {
        "hf_token": "hf_abcdefgh",
        "nested": [{"apiKey": "abcdefghij", "pad_token": "<pad>", "max_new_tokens": 64}],
        "url": f"https://me:{SECRET}@host",
        "note": "short",
    }
    assert redact(settings) == {
        "hf_token": "***",
        "nested": [{"apiKey": "***", "pad_token": "<pad>", "max_new_tokens": 64}],
        "url": "https://me:***@host",
        "note": "short",
    }
    assert redact_text(f"bad answer to {SECRET}!") == "bad answer to ***!"
    plain = {"a": {"api_key": "${oc.env:KEY}"}, "b": [{"secret": SECRET}], "server_api_key": "EMPTY"}
    assert list(literal_secrets(plain)) == ["b.0.secret"]


def test_a_secret_that_is_part_of_another_leaves_nothing_of_it(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-and-more")
    assert redact_text("abcdefgh-and-more, abcdefgh") == "***, ***"
