"""An independent draft as ``conf/model/draft.yaml`` describes it: one token a pass or all, of whatever tokenizer."""

from typing import Any

from torch import Tensor

from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.draft_start import has_other_tokens
from specdraft.drafters.pard import Pard
from specdraft.drafters.tli import TliDraft
from specdraft.errors import UserError
from specdraft.targets import Target


def for_target(
    target: Target,
    draft_vocabulary: Tensor | None = None,
    parallel: bool = False,
    mask_token: int | None = None,
    num_drafts: int = 8,
    step_decay: float = 0.7,
    sample_positions: bool = True,
    **options: Any,
) -> DraftModel:
    """A ``DraftModel`` for ``target``, a ``TliDraft`` where it starts as a checkpoint with another tokenizer, or if
    ``parallel`` a ``Pard``, which the options between are of; the others are those of ``DraftModel.for_target``. Raises
    UserError as these do, and for a ``Pard`` with another tokenizer."""
    others = has_other_tokens(target, **options)
    if others and parallel:
        wanted = "a checkpoint with the target's tokenizer, or model.drafter.parallel=false"
        raise UserError(f"parallel=true with a checkpoint of another tokenizer than the target's: expected {wanted}")
    if not parallel:
        return (TliDraft if others else DraftModel).for_target(target, draft_vocabulary, **options)
    of_masks: dict[str, Any] = {"mask_token": mask_token, "num_drafts": num_drafts}
    of_masks |= {"step_decay": step_decay, "sample_positions": sample_positions}
    return Pard.for_target(target, draft_vocabulary, **of_masks, **options)
