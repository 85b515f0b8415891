"""A trained drafter with another draft vocabulary: for data whose tokens the one it was trained with does not hold.

V / Vd = target / draft vocabulary, H = hidden size. A token that was drafted before keeps its row of each projection.
For another one the row that an untrained drafter begins with, the target's, would be far from what training makes of
it: the rows move together (on SmolLM2's head by as much as they were long, docs/recipes.md). So it begins where a
linear map of the untrained rows leads, fitted to the tokens that stay."""

import torch
from torch import Tensor

from specdraft.drafters.base import Drafter
from specdraft.drafters.objective import DraftHead
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.errors import UserError

_RIDGE = 1e-3  # beside the mean square of the rows: keeps the map finite where few tokens stay


def with_vocabulary_of(untrained: Drafter, trained: Drafter) -> Drafter:
    """``trained`` with the draft vocabulary of ``untrained``, a drafter of the same kind with its first weights.
    Raises UserError for a kind that has none."""
    if not (isinstance(trained, DraftVocabulary) and isinstance(untrained, DraftVocabulary)):
        what = f"a drafter of the kind {type(trained).__name__} has no draft vocabulary that could be chosen anew"
        raise UserError(f"{what}: expected init_vocabulary=own")
    ids = untrained.draft_ids
    drafter = type(trained)(**trained.config() | {"draft_vocab_size": len(ids)})
    drafter.set_draft_vocabulary(ids)
    drafter.files = trained.files
    first, state = untrained.state_dict(), drafter.state_dict()
    state |= {name: value for name, value in trained.state_dict().items() if name not in ("d2t", "t2d")}
    for name, module in drafter.named_modules():
        if isinstance(module, DraftHead):
            key = f"{name}.weight"
            state[key] = transfer_rows(state[key], trained.draft_ids, first[key], ids)
    drafter.load_state_dict(state)
    return drafter


def transfer_rows(trained: Tensor, trained_ids: Tensor, untrained: Tensor, ids: Tensor) -> Tensor:
    """Rows of a projection ``[Vd, H]`` to the ascending target ids ``ids [Vd]``, from the ``trained`` ones of
    ``trained_ids [Vd']``. ``untrained [Vd, H]``: what the rows were before they were trained. Without a token in both
    the rows are these."""
    place = torch.searchsorted(trained_ids, ids).clamp_max(len(trained_ids) - 1)
    stays = trained_ids[place] == ids
    if not bool(stays.any()):
        return untrained
    known = torch.nn.functional.pad(untrained.double(), (0, 1), value=1.0)  # [Vd, H + 1]
    kept = trained[place[stays]]
    moved = kept.double() - untrained[stays].double()
    square = known[stays].T @ known[stays]
    ridge = _RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype, device=square.device)
    rows = untrained + (known @ torch.linalg.solve(square + ridge, known[stays].T @ moved)).to(untrained.dtype)
    rows[stays] = kept.to(rows.dtype)
    return rows
