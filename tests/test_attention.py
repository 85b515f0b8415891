"""Attention with shared keys is the plain formula, each query head with its own copy of the keys."""

import pytest
import torch

from specdraft.attention import for_layers, shared_attention


def given(heads, shared, tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = (3, heads, tokens, 8), (3, heads // shared, 11, 8), (3, heads // shared, 11, 8)
    query, keys, values = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    mask = torch.rand((3, 1, tokens, 11), generator=generator) < 0.6
    mask[..., 0] = True
    return query, keys, values, mask


def plain(query, keys, values, mask, scale):
    shared = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(shared, dim=1).mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ values.repeat_interleave(shared, dim=1)).transpose(1, 2)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("heads", "shared"), [(6, 3), (4, 1), (5, 5)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_as_the_formula_says(heads, shared, tokens, masked):
    query, keys, values, mask = given(heads, shared, tokens)
    mask = mask if masked else None
    for scale, expected in ((None, 8**-0.5), (0.3, 0.3)):
        torch.testing.assert_close(
            shared_attention(query, keys, values, mask, scale), plain(query, keys, values, mask, expected)
        )


def test_keys_that_are_hidden_do_not_matter():
    query, keys, values, mask = given(6, 3, 4)
    mask[..., 5] = False
    before = shared_attention(query, keys, values, mask)
    keys[:, :, 5], values[:, :, 5] = 1e3, 1e3
    torch.testing.assert_close(shared_attention(query, keys, values, mask), before)


@pytest.mark.parametrize(("heads", "shared"), [(6, 3), (4, 1), (5, 5)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_mask_made_once_for_all_layers_says_the_same(heads, shared, tokens):
    query, keys, values, mask = given(heads, shared, tokens)
    expected = shared_attention(query, keys, values, mask)
    made = for_layers(mask, shared, query.dtype)
    assert made.shape == (3, 1, tokens if tokens == 1 else shared * tokens, 11)
    assert torch.equal(shared_attention(query, keys, values, made), expected)
    others = for_layers(mask, 2 * shared, query.dtype)  # of a model whose other layers share keys among more heads
    assert torch.equal(shared_attention(query, keys, values, others), expected)
