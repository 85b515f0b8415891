"""Serving formats, one file per family and per engine, and the parity check against the real engine."""

from specdraft.export.engine import Engine
from specdraft.export.writer import export, layout_for

__all__ = ["Engine", "export", "layout_for"]
