"""The frozen target: loading, auxiliary hidden states, and logits by its own head."""

from specdraft.targets.language_model import Capture, Features, LanguageModel
from specdraft.targets.target import Target, TargetIdentity

__all__ = ["Capture", "Features", "LanguageModel", "Target", "TargetIdentity"]
