"""Serving formats, one file per engine, and the parity check against the real engine."""

from specdraft.export.engine import Engine
from specdraft.export.writer import export

__all__ = ["Engine", "export"]
