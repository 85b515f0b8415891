"""Loaded before every test module: threads wait as in any command, here and in the processes that tests start."""

import logging

import pytest

import specdraft  # noqa: F401

import torch  # isort: skip  # after the threads' policy is set


@pytest.fixture(autouse=True)
def seeded_draws():
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def small_layers_packed_too():
    """Every layer is packed that can be: of the tests' models none is large enough, and so small ones are slower."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdraft.onednn._SMALL", 0)
        yield


@pytest.fixture(autouse=True)
def own_logging():
    """A command that runs in the tests' process sets up logging, to a stream that is closed when its test ends."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
