"""transformers' own assisted generation takes draft models; it has no place for heads."""

from collections.abc import Mapping
from typing import ClassVar

from specdraft.export.engine import SAMPLED, Engine


class Transformers(Engine):
    """``generate(assistant_model=...)``."""

    name = "transformers"
    families: ClassVar[Mapping[str, str]] = {"draft_model": "assistant_model"}
    drafting: ClassVar[str] = SAMPLED
