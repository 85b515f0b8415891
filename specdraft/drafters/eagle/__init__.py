"""The EAGLE family: one decoder layer that drafts from the target's hidden states and from its own output."""

from specdraft.drafters.eagle.eagle1 import Eagle
from specdraft.drafters.eagle.eagle3 import Eagle3
from specdraft.drafters.eagle.mtp import MTP
from specdraft.drafters.eagle.p_eagle import PEagle

__all__ = ["MTP", "Eagle", "Eagle3", "PEagle"]
