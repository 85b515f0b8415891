"""One word of the configuration chooses between token by token and all in one pass."""

from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.independent import for_target
from specdraft.drafters.pard import Pard


def test_parallel_or_not(target):
    plain = for_target(target, copy_layers=1, num_drafts=5)
    assert type(plain) is DraftModel and plain.language_model.num_layers == 1
    draft = for_target(target, parallel=True, copy_layers=1, num_drafts=5, step_decay=0.5, sample_positions=False)
    assert type(draft) is Pard and draft.language_model.num_layers == 1
    about = draft.config()
    assert about["num_drafts"] == 5 and about["step_decay"] == 0.5 and about["sample_positions"] is False
    assert about["mask_token"] == 96  # no tokenizer says better
