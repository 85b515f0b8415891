"""Loaded before every test module: threads wait as in any command, here and in the processes that tests start."""

import specdraft  # noqa: F401
