"""Serving formats, one file per family and per engine, and the parity check against the real engine."""

from specdraft.export.engine import Engine
from specdraft.export.writer import check_served, export, layout_for

__all__ = ["Engine", "check_served", "export", "layout_for"]
