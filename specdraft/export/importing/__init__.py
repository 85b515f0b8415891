"""Public drafters, as engines and trainers write them, become checkpoints of ours: ``specdraft import``."""

from specdraft.export.importing.head import import_head

__all__ = ["import_head"]
