"""A sharded target; with ranks it is tested in tests/training."""

import pytest
import torch

from specdraft.errors import UserError
from specdraft.targets.sharded import gathered, load_partitioned


def test_whole_weights_need_no_gathering():
    weight = torch.nn.Parameter(torch.ones(3))
    with gathered([weight], written=True), torch.no_grad():
        weight.mul_(2)
    assert weight.tolist() == [2, 2, 2]


def test_without_ranks_nothing_is_loaded(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match=r"zero3 shards the target over ranks, but WORLD_SIZE is not set: .*torchrun"):
        load_partitioned(lambda: pytest.fail("loaded"), torch.float32)
