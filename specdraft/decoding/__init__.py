"""Speculative decoding: draft trees, verification rules, sampling, the cache, and the loop that joins them."""
