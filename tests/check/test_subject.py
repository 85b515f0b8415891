"""A subject's drafters: as the configuration begins them, and with noise on all that is trained."""

import pytest
import torch

from specdraft.check import Subject
from specdraft.errors import UserError
from tests.check.mine import subject, target


def test_every_trained_weight_has_noise_the_same_each_time():
    mine = subject()
    plain, one, other = mine.plain(), mine.drafter(), mine.drafter()
    for (name, begun), first, second in zip(
        plain.named_parameters(), one.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(first, second) and first.dtype == torch.float64, name
        assert (first != begun).all() and torch.equal(first, first.float().double()), name
    assert one.target is mine.target


def test_what_is_no_drafter_is_refused():
    made = Subject(lambda target, draft_vocabulary: torch.nn.Linear(2, 2), target(), torch.arange(32))
    with pytest.raises(UserError, match="makes Linear: expected"):
        made.plain()
