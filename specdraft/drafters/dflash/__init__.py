"""DFlash: a block of tokens from one pass, whose attention reads the target's hidden states."""

from specdraft.drafters.dflash.dflash import DFlash

__all__ = ["DFlash"]
