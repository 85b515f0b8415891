import torch

from specdraft.data.store.source import InProcess
from tests.data.store.conftest import LAYERS


def test_the_source_of_this_process_is_the_target(making):
    rows = making.batches["validation"]
    with InProcess().open(making.target, LAYERS, 32) as capture:
        found = capture(rows.input_ids, rows.position_ids)
    torch.testing.assert_close(found, making.features(rows.input_ids, rows.position_ids), rtol=0, atol=0)
