"""What an engine has to say for itself: its name, what it cannot serve, and how it is started.

One subclass per engine, in a file of its own; ``conf/engine/*.yaml`` mirrors the constructors.
"""

from abc import ABC, abstractmethod

from specdraft.errors import UserError
from specdraft.export.layout import DTYPES


class Engine(ABC):
    """A serving engine. ``dtype`` is that of the exported weights; "auto" takes the dtype of the target in training."""

    name: str

    def __init__(self, dtype: str = "auto") -> None:
        if dtype != "auto" and dtype not in DTYPES:
            raise UserError(f"engine.dtype is {dtype!r}: expected auto, {', '.join(DTYPES)}")
        self.dtype = dtype

    def check_target(self, architecture: str) -> None:  # noqa: B027 - most engines serve them all
        """Raise UserError for a target (its transformers class) with which this engine serves no EAGLE-3 head."""

    @abstractmethod
    def usage(self, target: str, directory: str, num_draft_tokens: int, dtype: str) -> str:
        """Markdown for the model card: how this engine is started with the head in ``directory``."""
