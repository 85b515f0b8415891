"""EAGLE-1 heads as published: what is written is read back, and what of others is refused by name."""

import pytest
import torch

from specdraft.drafters.eagle import Eagle
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.sglang import SGLang
from specdraft.export.vllm import VLLM


@pytest.fixture
def published(make_drafter, save, tmp_path):
    """published(engine, **options) -> (head, its directory)."""

    def make(engine=None, **options):
        drafter = make_drafter("eagle", **options)
        return drafter, export(save(drafter), engine or VLLM(dtype="float32"), tmp_path / "public")

    return make


@pytest.mark.parametrize("engine", [VLLM(dtype="float32"), VLLM(dtype="bfloat16"), SGLang(dtype="float32")])
def test_it_comes_back_bit_by_bit(published, target, read_back, engine):
    drafter, directory = published(engine)
    imported = import_head(directory, target)
    assert type(imported) is Eagle and imported.target is target
    wanted = drafter.to(getattr(torch, engine.dtype)).float().state_dict()
    assert all(torch.equal(imported.state_dict()[name], each) for name, each in wanted.items())
    read_back(imported, engine, directory)


def test_what_it_borrows_may_lie_in_its_files(published, target, edit):
    drafter, directory = published()
    borrowed = {"embed_tokens.weight": target.embedding_weight, "lm_head.weight": target.head.weight}
    held = {name: weight.detach().clone() for name, weight in borrowed.items()}
    edit(directory, tensors=lambda tensors: tensors | held)
    assert import_head(directory, target).state_dict().keys() == drafter.state_dict().keys()
    edit(directory, tensors=lambda tensors: tensors | {"lm_head.weight": held["lm_head.weight"] + 1})
    with pytest.raises(UserError, match=r"lm_head\.weight in the files is not the target's own, which an EAGLE-1 head"):
        import_head(directory, target)


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"hidden_size": 16}, {}, "the head's hidden_size is 16 and the target's 32"),
        ({"hidden_act": "gelu"}, {}, "the head has hidden_act=gelu"),
        ({"num_hidden_layers": 2}, {}, "the head has several layers"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, {}, "layers that see a window"),
        ({}, {"fc.bias": torch.ones(32)}, "a bias in fc"),
        ({}, {"layers.0.input_layernorm.weight": torch.ones(32)}, "a norm before its attention"),
        ({}, {"layers.0.mlp.up_proj.weight": torch.ones(40, 32)}, "up_proj.weight is torch.float32"),
        ({"intermediate_size": 40}, {}, "expected torch.float32"),
    ],
)
def test_what_is_refused(published, target, edit, config, tensors, said):
    _, directory = published()
    edit(directory, config, lambda files: files | tensors)
    with pytest.raises(UserError, match=said):
        import_head(directory, target)


def test_layers_are_not_asked_for(published, target):
    _, directory = published()
    with pytest.raises(UserError, match="an EAGLE-1 head reads no auxiliary layers"):
        import_head(directory, target, [1, 2])
