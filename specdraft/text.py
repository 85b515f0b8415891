"""Short texts: hashes of settings and bytes, reasons of errors, values and numbers of things in messages."""

import hashlib
import json
from pathlib import Path
from typing import Any


def fingerprint(value: Any, digits: int = 16) -> str:
    """The first hexadecimal ``digits`` of SHA-256 over bytes, or over the JSON of any other value."""
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()[:digits]


def file_fingerprint(path: Path) -> str:
    """The ``fingerprint`` of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def reason(error: BaseException | str, limit: int = 300) -> str:
    """What an error says, in one line of at most ``limit`` characters; its kind if it says nothing."""
    said, *_ = " ".join(str(error).split()).split(" Set TORCHDYNAMO_VERBOSE=1")  # torch's advice to its developers
    return said[:limit] or type(error).__name__


def counted(number: int, noun: str) -> str:
    """A number of what the noun names, as "1 prompt" and "2,000 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(value: object, limit: int = 60) -> str:
    """``value`` as a text of at most ``limit`` characters."""
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
