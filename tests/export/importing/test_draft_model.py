"""Draft models as transformers writes them: what is exported is read back, and so is a sibling of others."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.pard import Pard
from specdraft.drafters.tli import TliDraft
from specdraft.errors import UserError
from specdraft.export import export
from specdraft.export.importing import import_head
from specdraft.export.vllm import VLLM
from tests.drafters.tli.two_tokenizers import code_target, save_prose_model


@pytest.fixture
def published(make_drafter, save, tmp_path):
    """published(family, dtype, **options) -> (draft, its directory)."""

    def make(family="draft_model", dtype="float32", **options):
        drafter = make_drafter(family, **options)
        return drafter, export(save(drafter), VLLM(dtype=dtype), tmp_path / "public")

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "kind"), [("draft_model", DraftModel), ("pard", Pard)])
def test_it_comes_back_bit_by_bit(published, target, read_back, family, kind, dtype):
    drafter, directory = published(family, dtype)
    imported = import_head(directory, target)
    assert type(imported) is kind and imported.target is target
    wanted = drafter.to(getattr(torch, dtype)).float().state_dict()
    assert all(torch.equal(imported.state_dict()[name], each) for name, each in wanted.items())
    read_back(imported, VLLM(dtype=dtype), directory)


def test_a_pard_draft_keeps_its_mask(published, target):
    drafter, directory = published("pard")
    assert import_head(directory, target).mask_token == drafter.mask_token


def test_a_sibling_that_nobody_exported(target, tmp_path):
    shape = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    model.save_pretrained(tmp_path / "sibling")
    imported = import_head(tmp_path / "sibling", target)
    ids = torch.arange(10)[None]
    said = imported.language_model.features(ids, ids).last
    torch.testing.assert_close(imported.language_model.logits(said), model(ids).logits, rtol=1e-5, atol=1e-5)


def test_another_tokenizer_comes_along_and_so_do_the_tokens_that_an_export_of_it_shares(save, tmp_path):
    target, sibling = code_target(), save_prose_model(tmp_path / "sibling")
    with pytest.warns(UserWarning, match="the draft proposes those alone"):
        draft = import_head(sibling, target)
    assert type(draft) is TliDraft and draft.target is target and "tokenizer.json" in draft.files
    directory = export(
        save(draft, {"max_position_embeddings": target.max_length}), VLLM(dtype="float32"), tmp_path / "public"
    )
    with pytest.warns(UserWarning, match="the draft proposes those alone"):
        again = import_head(directory, target)
    assert type(again) is TliDraft
    assert again.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], each) for name, each in draft.state_dict().items())


def test_what_is_refused(published, target, edit):
    _, directory = published()
    with pytest.raises(UserError, match="a draft model reads no auxiliary layers"):
        import_head(directory, target, [1, 2])
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    edit(directory, {"vocab_size": size + 1})
    with pytest.raises(UserError, match="vocab_size is 98 and the target's 97, and it has no tokenizer of its own"):
        import_head(directory, target)
    edit(directory, {"vocab_size": size, "hidden_size": 48})
    with pytest.raises(UserError, match="draft model"):
        import_head(directory, target)
