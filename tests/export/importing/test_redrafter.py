"""ReDrafters as published: what is written is read back bit by bit and says the same, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdraft.drafters.redrafter import ReDrafter
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.recurrent_drafting import RecurrentDrafting
from specdraft.export.vllm import VLLM

SILU = torch.nn.functional.silu


@pytest.fixture
def published(make_drafter, save, tmp_path):
    """published(dtype, **options) -> (drafter, its directory)."""

    def make(dtype="float32", **options):
        drafter = make_drafter("redrafter", **{"embedding_scale": 4.0} | options)
        return drafter, export(save(drafter), RecurrentDrafting(dtype=dtype), tmp_path / "public")

    return make


def files_of(directory):
    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("exit_size", "layers"), [(None, 2), (40, 1), (32, 3)])
def test_names_shapes_and_keys(published, exit_size, layers):
    drafter, directory = published(exit_size=exit_size, num_layers=layers)
    config, tensors = files_of(directory)
    width = exit_size or 64
    assert config == {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": 97,
        "hidden_size": 32,
        "exit_dim": width,
        "num_draft_layers": layers,
        "num_lookback_tokens": -1,
        "rnn": True,
        "torch_dtype": "float32",
    }
    expected = {"rnn_w.weight": (32, 32), "rnn_u.weight": (32, 32), "rnn_u.bias": (32,)}
    for layer in range(layers):
        expected |= {f"lm_head.{layer}.linear.weight": (width, width), f"lm_head.{layer}.linear.bias": (width,)}
    expected[f"lm_head.{layers}.weight"] = (97, width)
    if exit_size:
        expected |= {"input_proj.weight": (width, 64), "input_proj.bias": (width,)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert torch.equal(tensors["rnn_w.weight"], 4 * drafter.rnn_w.weight)


def test_the_file_alone_says_what_the_drafter_says(published, target):
    """The published formula on embeddings as they are, of the tensors of the file."""
    drafter, directory = published(exit_size=40)
    _, t = files_of(directory)
    last, state, ours = torch.randn(5, 32), torch.zeros(5, 32), torch.zeros(5, 32)
    for tokens in torch.randint(97, (3, 5)):
        read = target.embedding_weight[tokens] @ t["rnn_w.weight"].T
        state = SILU(read + state @ t["rnn_u.weight"].T + t["rnn_u.bias"])
        x = torch.cat([last, state], -1) @ t["input_proj.weight"].T + t["input_proj.bias"]
        for layer in range(2):
            x = x + SILU(x @ t[f"lm_head.{layer}.linear.weight"].T + t[f"lm_head.{layer}.linear.bias"])
        logits, ours = drafter.decoding_pass(1, last, tokens, ours)
        torch.testing.assert_close(logits, x @ t["lm_head.2.weight"].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exit_size", [None, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_comes_back_bit_by_bit_and_says_the_same(published, save, target, tmp_path, exit_size, dtype):
    drafter, directory = published(dtype, exit_size=exit_size, num_layers=1)
    imported = import_head(directory, target)
    assert isinstance(imported, ReDrafter) and imported.config()["embedding_scale"] == 1
    again = export(save(imported), RecurrentDrafting(dtype=dtype), tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (directory / file).read_bytes(), file
    drafter.to(getattr(torch, dtype)).float()
    given = torch.randn(6, 32), torch.arange(6), torch.randn(6, 32)
    for mine, theirs in zip(drafter.decoding_pass(1, *given), imported.decoding_pass(1, *given), strict=True):
        assert torch.equal(mine, theirs)


def test_no_engine_serves_it(published, save, make_drafter):
    with pytest.raises(UserError, match=r"^vllm serves no ReDrafter: expected one of"):
        export(save(make_drafter("redrafter")), VLLM())


def test_a_pruned_vocabulary_has_no_place(published):
    with pytest.raises(UserError, match=r"draft vocabulary of 32 of 97 tokens.*model\.draft_vocab_size=null"):
        published(draft_vocabulary=torch.arange(1, 97, 3))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rnn": False}, "rnn=false, a sum of embeddings"),
        ({"vocab_size": 98}, "vocab_size is 98 and the target's 97: expected a drafter of this target"),
        ({"hidden_size": 16}, "hidden_size is 16 and the target's 32"),
        ({"num_draft_layers": 0}, "num_draft_layers is 0: expected a positive number"),
        ({"exit_dim": "wide"}, "exit_dim is 'wide': expected a positive number"),
        ({"exit_dim": 40}, "missing: input_proj.bias, input_proj.weight"),
        ({"num_draft_layers": 3}, r"missing: lm_head\.2\.linear"),
    ],
)
def test_what_is_refused(published, target, changed, said):
    _, directory = published()
    config, _ = files_of(directory)
    (directory / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(UserError, match=said):
        import_head(directory, target)


def test_layers_are_not_asked_for_and_tensors_must_be_sound(published, target):
    _, directory = published()
    with pytest.raises(UserError, match="expected no --layers"):
        import_head(directory, target, [1, 2])
    _, tensors = files_of(directory)
    save_file(tensors | {"rnn_u.bias": torch.full((32,), torch.nan)}, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"rnn_u\.bias holds values that are not finite"):
        import_head(directory, target)
