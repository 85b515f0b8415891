"""The frozen target: loading, auxiliary hidden states, and logits by its own head."""

from specdraft.targets.language_model import Features, LanguageModel
from specdraft.targets.target import Target, TargetIdentity

__all__ = ["Features", "LanguageModel", "Target", "TargetIdentity"]
