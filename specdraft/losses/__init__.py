"""Divergences between the target's distribution and the draft's, computed in chunks."""
