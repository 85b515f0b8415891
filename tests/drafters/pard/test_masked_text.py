"""Attention without a mask against that under a dense one, in fp64, forward and backward; and what is visible."""

import pytest
import torch

from specdraft.drafters.alignment import StepDecay, align
from specdraft.drafters.pard import Pard
from specdraft.drafters.pard.masked_text import MaskedText
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.drafters.drafts import features_of, noisy
from tests.families import FAMILIES, V

HQ, HK, D = 4, 2, 6


def text_of(packed: Batch, steps: int = 4, seed: int = 0) -> MaskedText:
    torch.manual_seed(seed)
    return MaskedText(align(packed, steps, StepDecay(0.8, sampled=True)), 5)


def test_a_mask_stands_where_the_token_is_that_is_drafted(packed):
    text = text_of(packed)
    assert len(text.parts) == 4 and text.parts[0] == 46 and list(text.parts[1:]) == sorted(text.parts[1:], reverse=True)
    ids, positions = (part[0].split(text.parts) for part in (text.ids, text.positions))
    assert torch.equal(ids[0], packed.input_ids.flatten()) and (torch.cat(ids[1:]) == 5).all()
    flat = packed.position_ids.flatten()
    for depth, anchors in enumerate(text.anchors, start=1):
        assert torch.equal(positions[depth], flat[anchors] + depth)
        # The tokens up to the one that the mask is to say, all of the answer and of the same document.
        for ahead in range(depth + 2):
            assert packed.loss_mask.flatten()[anchors + ahead].all()
            assert torch.equal(flat[anchors + ahead], flat[anchors] + ahead)


def test_what_is_visible(packed):
    """Mask by mask, in words."""
    text = text_of(packed, steps=3)
    visible, parts = text.visible()[0], text.parts
    document = packed.document_ids.flatten() + 3 * (torch.arange(46) // 23)
    place = [(at, 0) for at in range(46)]
    place += [(int(at), depth) for depth, anchors in enumerate(text.anchors, start=1) for at in anchors]
    assert len(place) == sum(parts)
    for query, (anchor, depth) in enumerate(place):
        for key, (other, deep) in enumerate(place):
            of_text = deep == 0 and other <= anchor and document[other] == document[anchor]
            own = 0 < deep <= depth and other == anchor
            assert visible[query, key] == (of_text or own)


@pytest.mark.parametrize(("steps", "scaling", "width"), [(4, None, D), (1, 0.3, D), (4, 0.3, D - 2)])
def test_attention_is_that_of_the_dense_mask_with_gradients(packed, steps, scaling, width):
    text, g = text_of(packed, steps), torch.Generator().manual_seed(0)
    count = sum(text.parts)
    shapes = (HQ, D), (HK, D), (HK, width)
    leaves = [torch.randn(1, h, count, d, generator=g, dtype=torch.float64).requires_grad_() for h, d in shapes]
    weights = torch.randn(1, count, HQ, width, generator=g, dtype=torch.float64)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=text.visible()[:, None], scale=scaling, enable_gqa=True
    ).transpose(1, 2)
    expected = torch.autograd.grad((dense * weights).sum(), leaves)
    found = text.attend(*leaves, scaling)
    torch.testing.assert_close(found, dense)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", ["llama", "granite", "cohere"])
def test_a_model_gives_the_same_without_a_mask(family, packed, monkeypatch):
    """Whole drafts; with layers that are run again for backward, a mask is made."""
    target = Target.from_model(FAMILIES[family].build())
    packed = Batch(packed.input_ids % V, packed.position_ids, packed.document_ids, packed.loss_mask)
    made, results = [], []
    visible = MaskedText.visible
    monkeypatch.setattr(MaskedText, "visible", lambda text: made.append(1) or visible(text))
    for again in (False, True):
        options = {"mask_token": 5, "num_drafts": 4, "activation_checkpointing": again}
        draft = noisy(Pard.for_target(target, **options)).train()
        torch.manual_seed(1)
        loss = draft.training_loss(packed, features_of(target, packed), target).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in draft.parameters())])
        assert len(made) == again
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_mixed_precision_needs_no_mask_either(packed, monkeypatch):
    """Nor does the model that is asked for the first time leave weights without gradients to its training."""
    target = Target.from_model(FAMILIES["llama"].build().float())
    packed = Batch(packed.input_ids % V, packed.position_ids, packed.document_ids, packed.loss_mask)
    draft = Pard.for_target(target, mask_token=5, num_drafts=4).train()
    monkeypatch.setattr(MaskedText, "visible", None)
    with torch.autocast("cpu", torch.bfloat16):
        draft.training_loss(packed, features_of(target, packed), target).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in draft.parameters())
