"""The tiny target and the conversations of the data's tests; commands, called as a shell calls them."""

import sys
from collections.abc import Callable

import pytest
from hydra.core.global_hydra import GlobalHydra

from tests.data.conftest import library, target, tokenizer
from tests.data.regeneration.conftest import engine, talks

__all__ = ["engine", "library", "talks", "target", "tokenizer"]


@pytest.fixture
def called(monkeypatch, capsys):
    """called(main, settings...) -> exit status, standard output, standard error."""

    def run(main: Callable[[], object], *settings: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["command", *settings])
        try:
            main()
        except SystemExit as ended:
            return (ended.code, *capsys.readouterr())
        return (0, *capsys.readouterr())

    return run
