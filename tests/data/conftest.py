"""A tiny random target with a real tokenizer, and a folder that looks like a small standard library."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdraft.data.sources import stdlib
from specdraft.data.sources.base import SPLITS
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.targets import Target

FUNCTION = '''
def add_{n}(left, right):
    """Return the sum of left and right, plus {n}."""
    total = left + right
    return total + {n}


class Counter{n}:
    def count_{n}(self, step):
        """Count {n} steps further and return the new value."""
        self.value += step * {n}
        return self.value
'''


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documented functions per file; files enough for every split."""
    root = tmp_path_factory.mktemp("library")
    for n in range(120):
        (root / f"module_{n}.py").write_text(FUNCTION.format(n=n))
    splits = {stdlib.split_of(path) for path in stdlib.files(root)}
    assert splits == set(SPLITS)
    return root


@pytest.fixture(scope="session")
def tokenizer(library: Path) -> PreTrainedTokenizerFast:
    return train_tokenizer((path.read_text() for path in sorted(library.iterdir())), vocab_size=400, context=256)


@pytest.fixture
def target(tokenizer: PreTrainedTokenizerFast) -> Target:
    """In fp64, so that padding cannot turn a near-tie."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Target.from_model(LlamaForCausalLM(config).double(), tokenizer)
