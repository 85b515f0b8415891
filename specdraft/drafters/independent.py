"""An independent draft as ``conf/model/draft.yaml`` describes it: of one token a pass or of all of them, and
of whatever tokenizer."""

from typing import Any

from torch import Tensor

from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.draft_start import has_other_tokens
from specdraft.drafters.pard import Pard
from specdraft.drafters.tli import TliDraft
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
    UserError as these do."""
    if not parallel:
        kind = TliDraft if has_other_tokens(target, **options) else DraftModel
        return kind.for_target(target, draft_vocabulary, **options)
    of_masks: dict[str, Any] = {"mask_token": mask_token, "num_drafts": num_drafts}
    of_masks |= {"step_decay": step_decay, "sample_positions": sample_positions}
    return Pard.for_target(target, draft_vocabulary, **of_masks, **options)
