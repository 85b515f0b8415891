"""Drafting with an EAGLE head: what its keys hold."""

import torch

from specdraft.drafters.eagle.drafting import CachedKeys

HQ, HK, D = 4, 2, 6


def test_cached_attention_equals_uncached_and_forgets_drafts():
    g = torch.Generator().manual_seed(1)
    key, value = (torch.randn(7, HK, D, generator=g, dtype=torch.float64) for _ in range(2))
    query = torch.randn(1, HQ, D, generator=g, dtype=torch.float64)
    whole = CachedKeys(7)(query, key, value)

    cached = CachedKeys(2)  # smaller than what comes: it grows
    cached(query, key[:4], value[:4])
    cached(query, key[:2] + 1, value[:2] - 1)  # drafted, then rejected
    cached.length = 4
    torch.testing.assert_close(cached(query, key[4:], value[4:]), whole, rtol=1e-12, atol=1e-12)
    assert cached.length == 7
