"""The draft vocabulary: offsets and marks as engines read them, in the checkpoint only where they say something."""

import pytest
import torch

from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.errors import UserError

V = 97


def of_size(size, persistent=True):
    module = DraftVocabulary()
    module.register_vocabulary(V, size, persistent)
    return module


def test_ids_are_kept_as_offsets_and_marks():
    ids = torch.arange(3, V, 2)
    module = of_size(len(ids))
    module.set_draft_vocabulary(ids)
    assert torch.equal(module.d2t, ids - torch.arange(len(ids))) and module.d2t.dtype == torch.int64
    assert torch.equal(module.t2d.nonzero()[:, 0], ids) and module.t2d.dtype == torch.bool
    assert torch.equal(module.draft_ids, ids) and torch.equal(module.vocabulary.ids, ids)
    assert set(module.state_dict()) == {"d2t", "t2d"}


def test_until_then_it_is_the_first_ids():
    assert of_size(5).draft_ids.tolist() == of_size(5).t2d.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_the_whole_vocabulary_needs_no_mapping():
    assert of_size(V).vocabulary == (V, None)
    assert not of_size(V, persistent=False).state_dict()


@pytest.mark.parametrize("ids", [[5, 3], [3, 3], [-1, 4], [3, V], [1, 2, 3]])
def test_bad_ids_are_refused(ids):
    with pytest.raises(UserError, match="expected 2 ascending ids below 97"):
        of_size(2).set_draft_vocabulary(torch.tensor(ids))


@pytest.mark.parametrize("size", [0, V + 1])
def test_a_bad_size_is_refused(size):
    with pytest.raises(UserError, match="expected 1 to 97"):
        of_size(size)
