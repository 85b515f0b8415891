"""specdraft: train draft models for speculative decoding; what you train is what you serve."""

from specdraft import threads as _threads  # noqa: F401  # before anything loads torch

__version__ = "0.1.0"
