"""Loaded before every test module: threads wait as in any command, here and in the processes that tests start."""

import pytest

import specdraft  # noqa: F401

import torch  # isort: skip  # after the threads' policy is set


@pytest.fixture(autouse=True)
def seeded_draws():
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.manual_seed(0)
