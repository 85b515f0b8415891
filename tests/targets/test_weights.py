"""Single weights of a target's files."""

import json

import pytest
import torch
from safetensors.torch import save_file

from specdraft.errors import UserError
from specdraft.targets.weights import Weights

A, B = torch.arange(6.0).view(2, 3), torch.ones(2)


@pytest.fixture(params=["whole", "in parts"])
def checkpoint(request, tmp_path):
    if request.param == "whole":
        save_file({"model.a.weight": A, "b": B}, tmp_path / "model.safetensors")
    else:
        files = {"model.a.weight": "model-1.safetensors", "b": "model-2.safetensors"}
        save_file({"model.a.weight": A}, tmp_path / "model-1.safetensors")
        save_file({"b": B}, tmp_path / "model-2.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return str(tmp_path)


def test_what_is_asked_for_is_read(checkpoint):
    weights = Weights(checkpoint)
    assert "b" in weights and "c" not in weights
    read = weights.read(["model.a.weight", "b"])
    assert torch.equal(read["model.a.weight"], A) and torch.equal(read["b"], B)
    with pytest.raises(UserError, match=r"the files of the target .* lack c: expected a whole checkpoint"):
        weights.read(["c"])


def test_a_name_is_found_by_its_end_if_it_is_the_only_one(checkpoint, tmp_path):
    assert Weights(checkpoint).ending("a.weight") == "model.a.weight"
    assert Weights(checkpoint).ending("weight") == "model.a.weight"
    assert Weights(checkpoint).ending("eight") is None
    other = tmp_path / "other"
    other.mkdir()
    save_file({"x.a": A, "y.a": B}, other / "model.safetensors")
    assert Weights(str(other)).ending("a") is None


def test_no_weights(tmp_path):
    with pytest.raises(UserError, match=r"has no model.safetensors: expected its weights as safetensors"):
        Weights(str(tmp_path))


def test_an_index_does_not_lead_out_of_its_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret"}}))
    with pytest.raises(UserError, match="which lies elsewhere"):
        Weights(str(tmp_path)).read(["a"])


def test_a_name_is_found_by_a_pattern(checkpoint):
    assert Weights(checkpoint).matching(r"model\..*\.weight") == "model.a.weight"
    assert Weights(checkpoint).matching("a") is None
