"""Medusa heads as published: what is written is read back, under either set of names, and what is refused."""

import pytest
import torch

from specdraft.drafters.medusa import Medusa
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.vllm import VLLM


@pytest.fixture
def published(make_drafter, save, tmp_path):
    """published(dtype, **options) -> (heads, their directory)."""

    def make(dtype="float32", **options):
        drafter = make_drafter("medusa", **options)
        return drafter, export(save(drafter), VLLM(dtype=dtype), tmp_path / "public")

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_come_back_bit_by_bit(published, target, read_back, dtype):
    drafter, directory = published(dtype, num_heads=3, num_layers=2)
    imported = import_head(directory, target)
    assert isinstance(imported, Medusa) and imported.num_heads == 3 and imported.target is target
    wanted = drafter.to(getattr(torch, dtype)).float().state_dict()
    assert all(torch.equal(imported.state_dict()[name], each) for name, each in wanted.items())
    read_back(imported, VLLM(dtype=dtype), directory)


def test_the_names_of_other_releases_and_a_configuration_without_sizes(published, target, edit):
    drafter, directory = published(num_heads=2, num_layers=1)
    bare = dict.fromkeys(("hidden_size", "vocab_size", "architectures", "model_type", "medusa_fc_bias"))
    edit(directory, bare, lambda tensors: {f"medusa_heads.{name}": each for name, each in tensors.items()})
    imported = import_head(directory, target)
    assert all(torch.equal(imported.state_dict()[name], each) for name, each in drafter.state_dict().items())
    edit(directory, {"model_type": "medusa"}, lambda _: dict(drafter.state_dict()))
    again = import_head(directory, target).state_dict()
    assert all(torch.equal(again[name], each) for name, each in drafter.state_dict().items())


def test_blocks_without_a_bias_get_zeros(published, target, edit):
    _, directory = published()
    edit(directory, tensors=lambda all_: {name: each for name, each in all_.items() if not name.endswith("bias")})
    biases = [each for name, each in import_head(directory, target).state_dict().items() if name.endswith("bias")]
    assert biases and not any(bias.any() for bias in biases)


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        (
            {"vocab_size": 98},
            {},
            "the Medusa heads' vocab_size is 98 and the target's 97: expected Medusa heads of this",
        ),
        ({"original_lm_head": True}, {}, "share one projection"),
        ({}, {"token_map": torch.arange(3)}, "draft a part of the vocabulary"),
        ({}, {"2.1.weight": None}, r"missing: lm_heads\.2\.weight"),
        ({}, {"0.1.weight": torch.zeros(96, 32)}, r"lm_heads\.0\.weight is torch.float32 \[96, 32\]"),
        ({}, {"0.0.linear.weight": torch.full((32, 32), torch.nan)}, "not finite"),
        ({}, {f"{head}.0.linear.{kind}": None for head in range(5) for kind in ("weight", "bias")}, "hold no block"),
    ],
)
def test_what_is_refused(published, target, edit, config, tensors, said):
    _, directory = published()

    def changed(files):
        return {name: each for name, each in (files | tensors).items() if each is not None}

    edit(directory, config, changed)
    with pytest.raises(UserError, match=said):
        import_head(directory, target)


def test_layers_are_not_asked_for(published, target):
    _, directory = published()
    with pytest.raises(UserError, match="Medusa heads read no auxiliary layers of the target: expected no --layers"):
        import_head(directory, target, [1, 2])
