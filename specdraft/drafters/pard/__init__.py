"""PARD: an independent draft model that proposes all tokens of a draft in one pass."""

from specdraft.drafters.pard.pard import Pard

__all__ = ["Pard"]
