"""What a person can act on: one sentence that says what was wrong, what was expected and how to mend it."""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

_LONGEST = 1600  # characters


class UserError(Exception):
    """Bad input or a missing means, found before any work was lost. Entry points print it and exit with 2."""

    def __init__(self, message: str) -> None:
        """One line that any terminal can print, whatever a file or a library puts into it."""
        printable = message.encode(errors="backslashreplace").decode()
        line = " ".join(line.strip() for line in printable.splitlines() if line.strip())
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}")


def check_whole_number(name: str, value: Any, least: int, meaning: str) -> None:
    """Raise UserError unless ``value`` is a whole number from ``least`` upwards: an override may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} is {value}: expected a whole number of at least {least}, {meaning}")


def check_switch(name: str, value: Any) -> None:
    """Raise UserError unless ``value`` is true or false: any text, as in ``name=no``, is true to Python."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {'null' if value is None else value}: expected true or false")


def warn(message: str) -> None:
    """A warning about what the user gave, without the line of ours that happens to give it."""
    warnings.warn_explicit(message, UserWarning, "specdraft", 0)


def exit_on_user_error(main: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an entry point: a ``UserError`` becomes one line on standard error and exit status 2."""

    @functools.wraps(main)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    return wrapped
