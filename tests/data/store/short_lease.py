"""Imported by a command: what a dead process has claimed is free after seconds, not after a minute."""

from specdraft.data.bucket import Bucket

Bucket.__init__.__defaults__ = (5.0,)
