"""No secret is written down: not in configurations that are saved, not in results, logs or messages.

A secret is the value of a setting or of an environment variable whose name says so (``api_key``, ``HF_TOKEN``)."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_NAME = re.compile(r"(?:^|[_.-])(?:api_?key|key|token|secret|password|credentials?)$", re.IGNORECASE)
_SHORTEST = 8  # characters; "EMPTY" and "none", as local servers take them, hide nothing
_HIDDEN = "***"


def redact(value: Any, key: str = "") -> Any:
    """A copy of plain containers in which no secret is left; numbers and names stay as they are."""
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if _is_secret(key, value):
        return _HIDDEN
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """``text`` without the values of secret environment variables."""
    secrets = {value for name, value in os.environ.items() if _is_secret(name, value)}
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, _HIDDEN)
    return text


def literal_secrets(settings: Any, prefix: str = "") -> Iterator[str]:
    """Names of the settings whose secret is written out and not an interpolation (``${oc.env:NAME}``).
    ``settings``: plain containers, not resolved."""
    pairs: Iterable[tuple[Any, Any]] = settings.items() if isinstance(settings, Mapping) else enumerate(settings)
    for key, value in pairs:
        name = f"{prefix}{key}"
        if isinstance(value, Mapping | list):
            yield from literal_secrets(value, f"{name}.")
        elif _is_secret(str(key), value) and "${" not in value:
            yield name


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and len(value) >= _SHORTEST and _NAME.search(name) is not None
