"""The maps between two vocabularies, and a model that is seen through them."""

import pytest
import torch

from specdraft.drafters.tli.shared_vocabulary import SharedVocabulary, TranslatingModel
from specdraft.drafters.tli.tokens import SharedTokens
from specdraft.errors import UserError
from specdraft.targets import LanguageModel
from tests.fakes import tiny_llama

TOKENS = SharedTokens(torch.tensor([1, 2, 5]), torch.tensor([3, 0, 2]), unknown=4)


@pytest.fixture
def shared() -> SharedVocabulary:
    vocabulary = SharedVocabulary(7, 5, 3)
    vocabulary.share(TOKENS)
    return vocabulary


def test_the_maps(shared):
    assert shared.to_draft.tolist() == [4, 3, 0, 4, 4, 2, 4]
    assert shared.draft_ids.tolist() == [1, 2, 5] and shared.rows.tolist() == [3, 0, 2]


def test_logits_are_renormalised_over_what_is_shared(shared):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    q = shared.spread(logits).softmax(-1)
    whole = logits.softmax(-1)
    kept = whole[..., [3, 0, 2]] / whole[..., [3, 0, 2]].sum(-1, keepdim=True)
    torch.testing.assert_close(q[..., [1, 2, 5]], kept)
    assert q.shape == (2, 3, 7) and (q[..., [0, 3, 4, 6]] == 0).all()


def test_what_is_saved_is_all_of_it(shared):
    again = SharedVocabulary(7, 5, 3)
    again.load_state_dict(shared.state_dict())
    assert torch.equal(again.to_draft, shared.to_draft) and torch.equal(again.rows, shared.rows)


def test_ids_that_there_are_not_are_refused(shared):
    with pytest.raises(UserError, match="expected 1 to 7"):
        SharedVocabulary(7, 9, 8)
    for wrong in (5, -1):
        shared.to_draft[3] = wrong
        with pytest.raises(UserError, match=r"maps a token to .*: expected ids of a draft of 5 tokens"):
            shared.set_draft_vocabulary(shared.draft_ids)


def test_a_model_reads_the_drafts_ids():
    shared, model = SharedVocabulary(7, 20, 3), tiny_llama(20)
    shared.share(TOKENS)
    seen, plain = TranslatingModel(model, shared), LanguageModel(model)
    ids, positions = torch.tensor([[5, 0, 1, 2, 6]]), torch.arange(5)[None]
    theirs = plain.features(torch.tensor([[2, 4, 3, 0, 4]]), positions)
    assert torch.equal(seen.features(ids, positions).last, theirs.last)
    assert torch.equal(seen.logits(theirs.last)[..., [1, 2, 5]], plain.logits(theirs.last)[..., [3, 0, 2]])
    assert seen.vocab_size == 7
