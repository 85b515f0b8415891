"""A trainable language model: gradients flow, cached steps are its own forward, and its weights stay where they are."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from specdraft.decoding.passes import Pass
from specdraft.errors import UserError
from specdraft.targets import Features, LanguageModel
from tests.families import FAMILIES, LENGTH

# Norms and rotary angles are computed in fp32 even in an fp64 model.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def model(family) -> LanguageModel:
    return LanguageModel(family.build())


def columns(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def test_gradients_reach_every_weight(model, ids):
    features = model.features(ids, columns(ids))
    # Every expert of a mixture is chosen by some token here, and the last norm's output goes through the head.
    (model.logits(features.last) * torch.randn(61, dtype=torch.float64)).sum().backward()
    without = [name for name, p in model.model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def test_logits_are_the_models_own(model, ids):
    model.check_logits()
    expected = model.model(ids, use_cache=False).logits
    ours = model.logits(model.features(ids, columns(ids)).last)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_rows_of_different_lengths_go_on_side_by_side(model, ids):
    """As on-policy sampling does it: a padded first pass, then a token a time behind each row's own length."""
    longest = LENGTH - 8
    lengths = torch.tensor([longest, 5])
    cache = model.new_cache(2, LENGTH)
    model.step(Pass.text(ids[:, :longest], torch.zeros_like(lengths), 0), cache)
    whole = model.features(ids, columns(ids)).last
    for step in range(3):
        reading = Pass.text(ids.gather(1, (lengths + step)[:, None]), lengths + step, longest + step)
        last = model.step(reading, cache).last[:, 0]
        torch.testing.assert_close(last, whole[torch.arange(2), lengths + step], **CLOSE)


def test_rows_from_any_on_are_read_and_the_others_left_alone(model, ids):
    """A request is begun, and goes on, while others lie in the cache."""
    cache, whole = model.new_cache(3, LENGTH), model.features(ids, columns(ids), (1, 3))
    for row in range(2):
        model.step(Pass.prompt(ids[row, :9].tolist(), model.device), cache, (), 2 - row)
    held, count = torch.tensor([9, 9]), 4
    found = model.step(Pass.text(ids.flip(0)[:, 9 : 9 + count], held, 9), cache, (1, 3), 1)
    for ours, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, expected.flip(0)[:, 9 : 9 + count], **CLOSE)
    assert not any(layer.keys[0].any() or layer.values[0].any() for layer in cache.layers)


def test_features_of_some_positions_are_taken(ids):
    features = Features(torch.randn(2, 5, 6), torch.randn(2, 5, 3))
    taken = features.take(torch.tensor([[4, 0, 0], [1, 2, 3]]))
    for part, whole in zip(taken, features, strict=True):
        assert torch.equal(part[0], whole[0, [4, 0, 0]]) and torch.equal(part[1], whole[1, 1:4])


def test_it_is_a_view_of_the_model(model):
    assert not isinstance(model, torch.nn.Module)
    assert all(parameter.requires_grad for parameter in model.model.parameters())
    model.model.float()
    assert model.dtype == torch.float32


def flash_attention(module, query, key, value, attention_mask, position_ids=None, recognizes=None, **kwargs):
    """As transformers' flash attention separates documents: by its own predicate, and without masks.

    query ``[B, heads, T, d]`` -> ``[B, T, heads, d]``.
    """
    assert attention_mask is None
    recognizes = _is_packed_sequence if recognizes is None else recognizes
    groups, scale = query.shape[1] // key.shape[1], kwargs["scaling"]
    parts = [part.repeat_interleave(groups, dim=1) for part in (key, value)]
    ends = [query.shape[2]]
    if recognizes(position_ids, len(query)):
        ends = [*(position_ids[0] == 0).nonzero()[1:, 0].tolist(), *ends]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    documents = zip(*(part.split(lengths, dim=2) for part in (query, *parts)), strict=True)
    attended = [scaled_dot_product_attention(*document, is_causal=True, scale=scale) for document in documents]
    return torch.cat(attended, dim=2).transpose(1, 2), None


@pytest.fixture
def packed_ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions ``[2, 12]``: documents of 5 and 7 tokens, and of 3, 8 and 1."""
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in (5, 7, 3, 8, 1)]).view(2, 12)
    return ids, positions


@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen_stand_in"])
def test_packed_documents_of_several_sequences_do_not_see_each_other(attention, packed_ids):
    AttentionInterface.register("varlen_stand_in", flash_attention)
    model = LanguageModel(FAMILIES["llama"].build(attn_implementation=attention))
    ids, positions = packed_ids
    together = model.features(ids, positions, (1, 3))
    flat = Features(*(part.flatten(0, 1) for part in together))
    assert together.last.shape == (2, 12, 32) and together.aux.shape == (2, 12, 64)
    begins = [*(positions.flatten() == 0).nonzero()[:, 0].tolist(), 24]
    for start, end in itertools.pairwise(begins):
        alone = model.features(ids.flatten()[None, start:end], torch.arange(end - start)[None], (1, 3))
        for ours, expected in zip(flat, alone, strict=True):
            torch.testing.assert_close(ours[start:end], expected[0], **CLOSE)


def test_an_attention_that_never_separates_documents_and_takes_no_masks_is_refused(packed_ids):
    def blind(*inputs, **options):
        return flash_attention(*inputs, **options, recognizes=lambda *_: False)

    AttentionInterface.register("blind_stand_in", blind)
    model = LanguageModel(FAMILIES["llama"].build(attn_implementation="blind_stand_in"))
    with pytest.raises(UserError, match="takes no masks"):
        model.features(*packed_ids)
