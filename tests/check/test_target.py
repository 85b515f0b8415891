"""The random target: the same each time, far from uniform, refused where the checks could not use it."""

import pytest
import torch

from specdraft.check import random_target
from specdraft.errors import UserError


def test_it_is_the_same_each_time_and_far_from_uniform():
    before = torch.get_rng_state()
    one, other = random_target(), random_target()
    assert torch.equal(torch.get_rng_state(), before)
    assert one.identity == other.identity != random_target(seed=1).identity
    ids = torch.arange(20)[None]
    p = one.logits(one.features(ids, ids).last).softmax(-1)
    assert p.dtype == torch.float64 and p.amax(-1).mean() > 3 / one.vocab_size
    assert len(one.tokenizer) == one.vocab_size == 32 and not one.eos_token_ids


@pytest.mark.parametrize("options", [{"vocab_size": 4}, {"num_layers": 3}, {"hidden_size": 40}, {"dtype": "bfloat16"}])
def test_sizes_that_do_not_do(options):
    with pytest.raises(UserError, match="expected vocab_size of at least 8"):
        random_target(**options)
