"""Drafters made of the drafters that a command line names."""

from collections.abc import Sequence

from specdraft.drafters.base import Drafter
from specdraft.drafters.cascade import Cascade
from specdraft.drafters.ensemble import Ensemble
from specdraft.drafters.hybrid import Hybrid


def composed(
    drafters: Sequence[Drafter],
    inner: Drafter | None = None,
    ensemble: Drafter | bool | None = None,
    retrieval: Drafter | None = None,
    min_tokens: int = 2,
) -> Drafter:
    """The first of ``drafters``; with ``inner`` a cascade in which that drafts for it; with ``ensemble`` the ensemble
    of it, the others, and the one that is given (True: none beside them); with ``retrieval`` a hybrid that looks up
    first, if ``min_tokens`` are found. From the inside out, where several are given. Raises UserError as these do."""
    found = drafters[0]
    if inner is not None:
        found = Cascade(found, inner)
    if ensemble:
        found = Ensemble([found, *drafters[1:], *([ensemble] if isinstance(ensemble, Drafter) else [])])
    return found if retrieval is None else Hybrid(found, retrieval, min_tokens)
