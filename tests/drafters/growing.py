"""Stand between a drafter and the growth of its drafts."""

from collections.abc import Callable
from types import ModuleType

import pytest

from specdraft.drafters.draft_tree_builder import DraftTree


def replace_growth(monkeypatch: pytest.MonkeyPatch, module: ModuleType, grow: Callable[..., DraftTree]) -> None:
    """Let ``grow``, called as ``growth.grow`` is, grow the draft of the one request that ``module`` drafts for."""

    def grow_batch(logits, expand, shapes, sampling, generators, vocabulary):
        (shape,), (generator,) = shapes, generators
        return [grow(logits, lambda level: expand({0: level})[0], shape, sampling, generator, vocabulary)]

    monkeypatch.setattr(module, "grow_batch", grow_batch)
