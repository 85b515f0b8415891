"""A random target and checkpoints of drafters for it. All random, so that every mistake moves the numbers."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import about_target, save_drafter
from specdraft.drafters.dflash import DFlash, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.drafters.tli.tli_draft import SERVED
from specdraft.targets import Target
from tests.drafters.tli.drafts import translating

VOCABULARY = torch.arange(1, 97, 3)


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_theta=5000.0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        initializer_range=0.3,
    )
    model, folder = LlamaForCausalLM(config), tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return Target.from_model(model, name=str(folder))


@pytest.fixture
def save(target, tmp_path):
    """save(drafter, about=changes to what the checkpoint says of its target) -> its directory."""

    def write(drafter: Drafter, about: dict[str, Any] | None = None):
        data = {"source": "python-stdlib", "regenerated": True, "temperatures": [0.0, 1.0]}
        extra = {"decoding": {"num_draft_tokens": 4}, "data": data, "target": about_target(target) | (about or {})}
        return save_drafter(drafter, tmp_path / "run" / "drafter", target.identity, extra)

    return write


@pytest.fixture
def make_checkpoint(target, save):
    """make_checkpoint(vocabulary, about, **options) -> (an EAGLE-3 head, its directory)."""

    def make(vocabulary=VOCABULARY, about: dict[str, Any] | None = None, **options: Any):
        head = randomized(Eagle3.for_target(target, vocabulary, **options))
        return head, save(head, about)

    return make


@pytest.fixture
def make_drafter(target):
    """make_drafter(family, **options) -> a random drafter."""
    kinds: dict[str, Any] = {"eagle3": Eagle3, "eagle": Eagle, "p_eagle": PEagle, "medusa": Medusa, "mtp": MTP}
    kinds |= {"dflash": DFlash, "dspark": DSpark, "draft_model": DraftModel, "pard": Pard, "redrafter": ReDrafter}

    def make(family: str, **options: Any) -> Drafter:
        if family == "tli_draft":
            draft = randomized(translating(target, **options))
            draft.files = {SERVED + name: b"{}" for name in ("tokenizer.json", "tokenizer_config.json")}
            return draft
        vocabulary = VOCABULARY if family in ("eagle3", "p_eagle", "dflash", "dspark") else None
        return randomized(kinds[family].for_target(target, **{"draft_vocabulary": vocabulary} | options))

    return make


def randomized(drafter: Drafter) -> Drafter:
    torch.manual_seed(1)
    for name, parameter in drafter.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return drafter.eval()


@pytest.fixture
def identity(target) -> dict[str, Any]:
    return asdict(target.identity)
