"""DFlash: a block of tokens from one pass, whose attention reads the target's hidden states; and DSpark on top of it."""

from specdraft.drafters.dflash.dflash import DFlash
from specdraft.drafters.dflash.dspark import DSpark

__all__ = ["DFlash", "DSpark"]
