"""specdraft: train draft models for speculative decoding; what you train is what you serve."""

__version__ = "0.1.0"
