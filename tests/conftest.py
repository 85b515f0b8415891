"""Loaded before every test module: threads wait as in any command, here and in the processes that tests start."""

import copy
import logging

import pytest
from hydra._internal.core_plugins.file_config_source import FileConfigSource

import specdraft  # noqa: F401

import torch  # isort: skip  # after the threads' policy is set

from specdraft.entry import CONF


@pytest.fixture(autouse=True)
def seeded_draws():
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.default_generator.manual_seed(0)  # of the processor alone: torch.manual_seed takes a millisecond


@pytest.fixture(autouse=True, scope="session")
def short_probes():
    """A hundred evaluations ask how fast the machine is, and none of the tests how fast it is exactly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdraft.evaluation.speedup.roofline._SECONDS", 0.01)
        yield


@pytest.fixture(autouse=True, scope="session")
def configurations_read_once():
    """Seven hundred compositions read the same files of ``conf/``, which took a third of their time."""
    load, known = FileConfigSource.load_config, {}

    def loaded(source, config_path):
        key = (source.path, config_path)
        if source.path != str(CONF):  # a test's own, which it may write again
            return load(source, config_path)
        if key not in known:
            known[key] = load(source, config_path)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileConfigSource, "load_config", loaded)
        yield


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
