"""Runs that approach a level of one's own."""

import math

import pytest

from specdraft.forecast.runs import read_run
from tests.forecast.written import write_run


def saturating(level):
    return lambda n: level - 0.6 * math.exp(-n / 3e4)


@pytest.fixture
def make(tmp_path):
    """make(name, level, **settings) -> Run whose acceptance length approaches ``level``"""
    return lambda name, level, **settings: read_run(write_run(tmp_path / name, saturating(level), **settings))
