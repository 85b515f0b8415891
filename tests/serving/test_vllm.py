"""The class that vLLM loads by its name: made, filled and asked as vLLM 0.32 does it, without vLLM."""

import importlib
import inspect
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.drafters.checkpoint import save_drafter
from specdraft.drafters.draft_model import DraftModel
from specdraft.errors import UserError
from specdraft.export.proposer import PROPOSER
from specdraft.serving.settings import ProposerSettings
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama
from tests.serving.engine import Request, serve

LIMIT, K, NEW = 96, 4, 16
SUFFIX = {"_target_": "specdraft.drafters.suffix.Suffix"}


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_llama(context=LIMIT))


def vllm_config(settings, vocab_size=64, rows=2):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        additional_config=settings.entry(),
        model_config=SimpleNamespace(max_model_len=LIMIT, dtype=torch.float32, get_vocab_size=lambda: vocab_size),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        device_config=SimpleNamespace(device=torch.device("cpu")),
    )


def loaded(settings, **config):
    """As vLLM makes it from ``speculative_config.model``."""
    module, _, name = PROPOSER.rpartition(".")
    proposer = getattr(importlib.import_module(module), name)(vllm_config(settings, **config))
    proposer.load_model(torch.nn.Module())
    return proposer


def test_it_is_asked_as_vllm_asks():
    """``propose(sampled, lengths, ids, slot_mappings=...)``; a list for every row, whose lengths differ."""
    proposer = loaded(ProposerSettings(drafter=SUFFIX), rows=4)
    inspect.signature(proposer.propose).bind([], None, None, slot_mappings=None)
    ids = np.zeros((4, LIMIT), dtype=np.int32)
    ids[0, :9], ids[1, :3], ids[2, :5] = [5, 6, 7, 8, 9, 5, 6, 7, 8], [1, 2, 3], 9
    lengths = np.array([9, 3, 5, 0], dtype=np.int32)
    drafts = proposer.propose([[8], [3], []], lengths, ids, slot_mappings=None)
    assert drafts == [[9, 5, 6, 7], [], []]
    assert all(type(token) is int for draft in drafts for token in draft)


@pytest.mark.parametrize("retrieval", [None, SUFFIX | {"max_cached_requests": 0}], ids=["alone", "behind suffix"])
def test_a_draft_model_of_adaptive_length(target, tmp_path, retrieval):
    draft = DraftModel.for_target(target, copy_layers=[0]).eval()
    checkpoint = str(save_drafter(draft, tmp_path / "drafter", target.identity))
    stop = {"_target_": "specdraft.decoding.stopping.Confidence", "threshold": 0.3}
    settings = ProposerSettings(checkpoint=checkpoint, retrieval=retrieval, stop=stop)
    proposer = loaded(settings)
    prompts = random_prompts(4, [5, 9, 3])
    requests = [Request(prompt, Decoder(target).generate(prompt, NEW + K + 1).tokens, NEW) for prompt in prompts]
    serve(proposer.propose, requests, rows=2, swaps=True)
    ours = Decoder(target, settings.build()[0], StaticTree.chain(K, sampled=False, stop=Confidence(0.3)))
    generations = [ours.generate(prompt, NEW) for prompt in prompts]
    assert [(each.drafted, each.accepted) for each in requests] == [(e.drafted, e.accepted) for e in generations]
    assert len({length for each in requests for length in each.drafted}) > 1


def test_a_draft_of_another_vocabulary(target, tmp_path):
    checkpoint = str(save_drafter(DraftModel.for_target(target), tmp_path / "drafter", target.identity))
    with pytest.raises(UserError, match="a vocabulary of 64 tokens and the target one of 65"):
        loaded(ProposerSettings(checkpoint=checkpoint), vocab_size=65)


def test_it_needs_nothing_that_vllms_environment_lacks():
    modules = "specdraft.serving.vllm, specdraft.drafters.suffix, specdraft.drafters.hybrid"
    lacking = ("hydra", "omegaconf", "lightning", "deepspeed", "peft", "wandb")
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in lacking)
    command = [sys.executable, "-c", f"import sys; {blocked}import {modules}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
