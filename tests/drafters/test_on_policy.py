"""On-policy batches: answers that go on in the draft's own words."""

import pytest
import torch

from specdraft.drafters import on_policy
from specdraft.drafters.draft_model import DraftModel
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.training.module import DrafterModule
from specdraft.training.schedule import OptimizerSettings
from tests.drafters.drafts import draft_for, features_of, whole
from tests.fakes import tiny_llama
from tests.families import FAMILIES, V


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def changed(before: Batch, after: Batch) -> torch.Tensor:
    return before.input_ids != after.input_ids


def test_answers_are_chosen_within_their_documents(packed):
    assert on_policy.choose(packed, 0.0, generator()) == []
    answers = {(0, 0): [(3, 9)], (0, 9): [(14, 23)], (1, 0): [(4, 10), (13, 20)]}
    starts = {key: set() for key in answers}
    for seed in range(200):
        spans = on_policy.choose(packed, 1.0, generator(seed))
        assert {(span.sequence, span.begin) for span in spans} == answers.keys()
        for row, begin, start, end in spans:
            assert any(first <= start < last == end for first, last in answers[row, begin])
            starts[row, begin].add(start)
    for key, spans in answers.items():  # any supervised token may be the first
        assert starts[key] == {t for first, last in spans for t in range(first, last)}
    half = sum(len(on_policy.choose(packed, 0.5, generator(seed))) for seed in range(200))
    assert 240 < half < 360


def test_nothing_comes_before_a_documents_first_token():
    assert all(on_policy.choose(whole([1, 2]), 1.0, generator(s)) == [on_policy.Span(0, 0, 1, 2)] for s in range(20))
    assert on_policy.choose(whole([1]), 1.0, generator()) == []


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_continuations_are_the_drafts_own(name, monkeypatch):
    """With the most likely token in place of a sampled one, the text must be what the draft says of it."""
    target = Target.from_model(FAMILIES[name].build())
    draft = draft_for(target, copy_layers=2)
    g = generator(1)
    documents = torch.tensor([[0] * 9 + [1] * 14, [0] * 20 + [-1] * 3])
    positions = torch.tensor([[*range(9), *range(14)], [*range(20), *range(3)]])
    mask = (positions >= 3) & (documents >= 0)
    batch = Batch(torch.randint(0, V, (2, 23), generator=g), positions, documents, mask)
    monkeypatch.setattr(on_policy, "sample", lambda p, _: p.argmax(-1))
    spans = on_policy.choose(batch, 1.0, generator(3))
    after = on_policy.continue_answers(batch, draft.language_model, 1.0, frozenset(), generator(3))
    replaced = torch.zeros_like(mask)
    for row, _, start, end in spans:
        replaced[row, start:end] = True
    assert len(spans) == 3 and not changed(batch, after)[~replaced].any() and changed(batch, after)[replaced].any()
    for name in ("position_ids", "document_ids", "loss_mask"):
        assert torch.equal(getattr(batch, name), getattr(after, name))
    model = draft.language_model
    said = model.logits(model.features(after.input_ids, after.position_ids).last).argmax(-1)
    assert torch.equal(said[:, :-1][replaced[:, 1:]], after.input_ids[:, 1:][replaced[:, 1:]])


def test_continuations_are_sampled_at_temperature_one(small):
    model = DraftModel.for_target(small).double().language_model
    one = whole([7, 3, 9])
    batch = Batch(*(getattr(one, name).expand(4000, -1) for name in Batch.__dataclass_fields__))
    after = on_policy.continue_answers(batch, model, 1.0, frozenset(), generator())
    second = changed(batch, after)[:, 1].nonzero()[:, 0]  # rows whose second token was sampled, and came out another
    p = model.logits(model.features(torch.tensor([[7]]), torch.tensor([[0]])).last)[0, -1].softmax(-1).detach()
    p[3] = 0.0
    counted = torch.bincount(after.input_ids[second, 1], minlength=64) / len(second)
    assert len(second) > 1000
    torch.testing.assert_close(counted.double(), p / p.sum(), rtol=0, atol=0.04)


def test_nothing_is_learnt_behind_a_sampled_end_of_text(target, packed):
    model = draft_for(target).language_model
    spans = on_policy.choose(packed, 1.0, generator())
    after = on_policy.continue_answers(packed, model, 1.0, frozenset(range(97)), generator())
    expected = packed.loss_mask.clone()
    for row, _, start, end in spans:
        expected[row, start + 1 : end] = False
    assert torch.equal(after.loss_mask, expected)
    assert changed(packed, after).sum() <= len(spans), "old tokens stay behind the end"


def test_only_training_batches_are_prepared(target, packed):
    draft = draft_for(target, on_policy=1.0)
    module = DrafterModule(draft.train(), target, OptimizerSettings())
    seen = []
    inner = draft.training_loss

    def spy(batch, *rest):
        seen.append(batch)
        return inner(batch, *rest)

    object.__setattr__(draft, "training_loss", spy)
    module.training_step(packed, 0)
    module.training_step(packed, 0)
    module.training_step(packed, 1)
    module.validation_step(packed, 0)
    first, again, other, validation = (batch.input_ids for batch in seen)
    assert torch.equal(first, again) and not torch.equal(first, packed.input_ids) and not torch.equal(first, other)
    assert torch.equal(validation, packed.input_ids) and draft.training
    assert draft_for(target).prepare(packed, generator()) is packed


def test_sampling_under_autocast_spoils_no_gradient(packed):
    """Autocast keeps the weights that it has cast, without gradients where sampling did it."""
    target = Target.from_model(tiny_llama(97))
    draft = DraftModel.for_target(target, copy_layers=1, on_policy=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        batch = draft.prepare(packed, generator())
        loss = draft.training_loss(batch, features_of(target, batch), target).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())


def test_zero3_cannot_sample(target, packed):
    draft = draft_for(target, on_policy=1.0)
    next(draft.parameters()).ds_id = 0  # DeepSpeed's mark of a partitioned weight
    with pytest.raises(UserError, match="ZeRO-3 needs all ranks"):
        draft.prepare(packed, generator())
