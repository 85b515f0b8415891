"""What a store's index announces is what its files hold."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdraft.data.store import Store
from specdraft.data.store.contents import INDEX
from specdraft.errors import UserError


def is_mapped(tensor: torch.Tensor, file: Path) -> bool:
    """Whether the tensor is the file's own bytes, as far as the system can tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return True
    places = [line.split()[0].split("-") for line in maps.read_text().splitlines() if line.endswith(str(file))]
    return any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in places)


def test_sequences_are_what_an_independent_reader_finds_there_and_stay_on_disk(making):
    store, rows = making.store(), making.batches["train"]
    file = making.path / store.contents.splits["train"].file
    ids, positions, documents = torch.from_numpy(np.load(file)).unbind(1)
    assert torch.equal(torch.where(ids < 0, ~ids, ids), rows.input_ids.int())
    assert torch.equal(ids < 0, rows.loss_mask)
    assert torch.equal(positions, rows.position_ids.int()) and torch.equal(documents, rows.document_ids.int())
    for each in (store, pickle.loads(pickle.dumps(store))):
        assert torch.equal(each.data["train"].whole().input_ids, rows.input_ids)
        assert is_mapped(each.data["train"].tensor, file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("every_last", [True, False])
def test_the_bytes_that_are_announced_are_written(making, dtype, every_last):
    store = making.store(dtype=dtype, every_last=every_last)
    tensors = [t for names in store.shards.values() for name in names for t in load_file(making.path / name).values()]
    assert sum(tensor.nbytes for tensor in tensors) == store.contents.bytes()


def test_damaged_sequences_and_a_damaged_index_are_named(making):
    store = making.store()
    rows = making.path / store.contents.splits["train"].file
    content = bytearray(rows.read_bytes())
    rows.write_bytes(content[:-1] + b"\7")
    with pytest.raises(UserError, match=r"train-sequences-.* is damaged"):
        Store(making.path)
    rows.write_bytes(content)
    index = (making.path / INDEX).read_text()
    for changed in (index.replace('"sequences_per_shard": 2', '"sequences_per_shard": 3'), '{"version": 1}', "[]"):
        assert changed != index
        (making.path / INDEX).write_text(changed)
        with pytest.raises(UserError, match=r"index\.json is damaged or of another version"):
            Store(making.path)
    (making.path / INDEX).write_text(index[:-20])
    with pytest.raises(UserError, match=r"index\.json is damaged or of another version \(.*Invalid JSON"):
        Store(making.path)
