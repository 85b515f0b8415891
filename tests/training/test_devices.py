import re

import pytest
import torch

from specdraft.errors import UserError
from specdraft.training import devices


def test_each_rank_claims_its_own_gpu(monkeypatch):
    claimed: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for asked in ("auto", 2, "0,3", [4, 5]):
        devices.claim_gpu({"accelerator": "gpu", "devices": asked})
    devices.claim_gpu({"accelerator": "cpu", "devices": 2})
    assert claimed == [1, 1, 3, 5]
    for wrong in ("two", "0,b", 3.5, None, True, [0, 1.5]):
        with pytest.raises(UserError, match=re.escape(f"trainer.devices is {wrong}: expected auto, a number")):
            devices.world_size({"accelerator": "cpu", "devices": wrong, "num_nodes": 1})


def test_listed_devices_are_counted_on_every_node(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert devices.world_size({"accelerator": "gpu", "devices": "0,2", "num_nodes": 2}) == 4
    assert devices.world_size({"accelerator": "auto", "devices": "auto", "num_nodes": 1}) == 8


@pytest.mark.parametrize("gpus", [True, False])
def test_training_is_compiled_on_gpus_or_where_it_is_asked_for(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    assert devices.wants_compiled("auto", devices.uses_gpus("auto")) is gpus
    assert not devices.wants_compiled("auto", False)
    assert devices.wants_compiled(True, False) and not devices.wants_compiled(False, True)
    for wrong in ("yes", 2, None):
        with pytest.raises(UserError, match=f"compile is {wrong!r}: expected auto, true or false"):
            devices.wants_compiled(wrong, False)
