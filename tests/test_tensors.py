"""Tensors are compared before they are read, and buffers keep their dtype."""

import pytest
import torch
from safetensors.torch import save_file

from specdraft.errors import UserError
from specdraft.tensors import difference, keeping_buffers, kinds, read_kinds, read_tensors

TENSORS = {"a": torch.zeros(2, 3), "b": torch.arange(4), "c": torch.ones(1, dtype=torch.bfloat16)}


def test_kinds_of_a_file_are_those_of_its_tensors(tmp_path):
    save_file(TENSORS, tmp_path / "file.safetensors")
    assert read_kinds(tmp_path / "file.safetensors") == kinds(TENSORS)
    assert kinds(TENSORS) == {"a": "[2, 3] of floats", "b": "[4] of integers", "c": "[1] of floats"}
    read = read_tensors(tmp_path / "file.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("read", [read_kinds, read_tensors])
def test_damaged_files_are_named(tmp_path, read):
    path = tmp_path / "file.safetensors"
    save_file(TENSORS, path)
    for damaged in (path.read_bytes()[:-1], b"\xff" * 16, b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"file.safetensors is damaged \(.*expected a safetensors file"):
            read(path)
    with pytest.raises(UserError, match=r"absent is damaged \(.*o such file"):
        read(tmp_path / "absent")


def test_the_first_difference_is_told():
    held = kinds(TENSORS)
    assert difference(held, held) is None
    assert difference(held, held | {"d": "[1] of floats"}) == "d is unknown"
    assert difference(held | {"d": "[1] of floats"}, held) == "d is missing"
    other = held | {"b": "[4] of floats"}
    assert difference(other, held) == "b is [4] of integers, by the configuration [4] of floats"


def test_buffers_keep_their_dtype_and_follow_to_the_device():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("frequencies", torch.tensor([1.001]))
    module.register_buffer("ids", torch.arange(3))
    with keeping_buffers(module):
        module.to(torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    assert module.frequencies.dtype == torch.float32 and float(module.frequencies) == pytest.approx(1.001)
    with keeping_buffers(module):
        module.to("meta")
    assert module.frequencies.is_meta and module.ids.is_meta
