"""Loaded before every test module: threads wait as in any command, here and in the processes that tests start."""

import pytest

import specdraft  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process of its own for each file, whose fixtures are made once, unless a test names another group."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
