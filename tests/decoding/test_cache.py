"""The rewindable cache against transformers' own, which copies."""

import pytest
import torch
from transformers import DynamicCache

from specdraft.decoding.cache import RewindableCache


def pieces(*lengths, value_dim=6):
    """Keys ``[1, 2, t, 6]`` and values of a head size of their own."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(1, 2, t, 6, generator=g), torch.randn(1, 2, t, value_dim, generator=g)) for t in lengths]


@pytest.mark.parametrize("capacity", [1, 4, 100])
@pytest.mark.parametrize("value_dim", [6, 3])
def test_equals_the_copying_cache_and_grows(capacity, value_dim):
    ours, theirs = RewindableCache(2, capacity), DynamicCache()
    for key, value in pieces(3, 1, 6, 1, value_dim=value_dim):
        for layer in range(2):
            mine, plain = ours.update(key + layer, value, layer), theirs.update(key + layer, value, layer)
            assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
        assert ours.length == ours.get_seq_length() == theirs.get_seq_length()


def test_what_is_cropped_is_forgotten():
    (first, drafted, true) = pieces(4, 3, 2)
    cache = RewindableCache(2, 5)
    for key, value in (first, drafted):
        for layer in range(2):
            cache.update(key, value, layer)
    cache.crop(5)
    assert cache.length == 5
    for layer in range(2):
        keys, values = cache.update(*true, layer)
        assert torch.equal(keys, torch.cat([first[0], drafted[0][:, :, :1], true[0]], dim=2))
        assert torch.equal(values, torch.cat([first[1], drafted[1][:, :, :1], true[1]], dim=2))
    assert cache.length == 7


def test_within_its_capacity_it_writes_in_place():
    cache = RewindableCache(1, 8)
    (first, second) = pieces(3, 2)
    before = cache.update(*first, 0)[0].data_ptr()
    assert cache.update(*second, 0)[0].data_ptr() == before


def test_it_cannot_be_cropped_to_more_than_it_holds():
    cache = RewindableCache(1, 8)
    cache.update(*pieces(3)[0], 0)
    with pytest.raises(AssertionError):
        cache.crop(4)
