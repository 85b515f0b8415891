"""The frozen target: loading, auxiliary hidden states, and logits by its own head."""

from specdraft.targets.target import Features, Target, TargetIdentity

__all__ = ["Features", "Target", "TargetIdentity"]
