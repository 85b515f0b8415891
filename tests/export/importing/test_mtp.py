"""MTP layers as exported: what is written is read back, and what is refused."""

import pytest
import torch

from specdraft.drafters.eagle import MTP
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.vllm import VLLM


@pytest.fixture
def published(make_drafter, save, tmp_path):
    """published(dtype) -> (layer, its directory)."""

    def make(dtype="float32"):
        drafter = make_drafter("mtp")
        return drafter, export(save(drafter), VLLM(dtype=dtype), tmp_path / "public")

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_comes_back_bit_by_bit(published, target, read_back, dtype):
    drafter, directory = published(dtype)
    imported = import_head(directory, target)
    assert isinstance(imported, MTP) and imported.target is target
    wanted = drafter.to(getattr(torch, dtype)).float().state_dict()
    assert all(torch.equal(imported.state_dict()[name], each) for name, each in wanted.items())
    read_back(imported, VLLM(dtype=dtype), directory)


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"vocab_size": 98}, {}, "the MTP layer's vocab_size is 98 and the target's 97"),
        ({"architectures": ["Glm4MoeForCausalLM"]}, {}, "is Glm4MoeForCausalLM's, and engines run MiMoForCausalLM's"),
        ({}, {"lm_head.weight": torch.ones(97, 32)}, "lm_head.weight in the files is not the target's own"),
        ({}, {"model.mtp_layers.0.more.weight": torch.ones(3)}, "the MTP layer of the files is of another shape"),
        ({}, {"model.mtp_layers.0.final_layernorm.weight": torch.ones(3)}, "of another shape"),
    ],
)
def test_what_is_refused(published, target, edit, config, tensors, said):
    _, directory = published()
    edit(directory, config, lambda files: files | tensors)
    with pytest.raises(UserError, match=said):
        import_head(directory, target)


def test_layers_are_not_asked_for(published, target):
    _, directory = published()
    with pytest.raises(UserError, match="an MTP layer reads no auxiliary layers"):
        import_head(directory, target, [7])
