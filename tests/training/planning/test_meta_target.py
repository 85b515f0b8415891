from pathlib import Path

import pytest
import torch

from specdraft.errors import UserError
from specdraft.training.planning import meta_target

CONF = Path(__file__).parents[2] / "conf"


def test_missing_target_is_one_sentence(monkeypatch, tmp_path):
    def unreachable(*_args, **_kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr(meta_target, "get_hf_file_metadata", unreachable)
    with pytest.raises(UserError, match=r"not on this machine and the Hugging Face hub cannot be reached"):
        meta_target.target_config({"name": "nobody/nothing"})
    with pytest.raises(UserError, match="'models/my model' does not exist: expected a from_pretrained directory"):
        meta_target.target_config({"name": "models/my model"})
    with pytest.raises(UserError, match="does not exist"):
        meta_target.target_config({"name": str(tmp_path / "nothing")})
    with pytest.raises(UserError, match="no embedded target"):
        meta_target.target_config({"name": "embedded://large"})


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_weights_take_what_their_type_says(composed, dtype, size):
    shape = meta_target.shape_config(dict(composed("target=llama-8b").target_shape))
    shape.dtype = torch.bfloat16
    assert meta_target.bytes_per_parameter(dtype, shape) == size
    with pytest.raises(UserError, match=r"target.dtype is 'int3': expected auto, float64"):
        meta_target.bytes_per_parameter("int3", shape)


def test_a_target_without_memory_has_its_sizes(composed):
    target = meta_target.MetaTarget(meta_target.shape_config(dict(composed("target=llama-8b").target_shape)), "8b")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (32, 4096, 128256)
    assert {parameter.device.type for parameter in target.model.parameters()} == {"meta"}
    assert target.default_layers() == (2, 16, 29)
