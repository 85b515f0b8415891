"""The emulated product is the exact one where nothing overflows, and saturates by pairs where something does."""

import torch

from tests.parity.saturating import saturated_product


def test_pairs_saturate_and_small_codes_do_not():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(-127, 128, (3, 64), generator=generator, dtype=torch.int32)
    small = torch.randint(-64, 65, (8, 64), generator=generator, dtype=torch.int32)
    assert torch.equal(saturated_product(inputs, small), (inputs @ small.T).long())
    # (127 + 128) x (127 + 127) is 64,770, which becomes 32,767; the shift of 128 x 254 is taken off again.
    pair = torch.tensor([[127, 127]], dtype=torch.int32)
    assert saturated_product(pair, pair).tolist() == [[32767 - 128 * 254]]
