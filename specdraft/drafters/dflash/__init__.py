"""DFlash: a block of tokens from one pass, whose attention reads the target's hidden states.

DSpark and Domino correct its slots by what was drafted before them."""

from specdraft.drafters.dflash.dflash import DFlash
from specdraft.drafters.dflash.domino import Domino
from specdraft.drafters.dflash.dspark import DSpark

__all__ = ["DFlash", "DSpark", "Domino"]
