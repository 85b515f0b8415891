"""A tiny random target with a real tokenizer, and a folder that looks like a small standard library."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdraft.data.sources import stdlib
from specdraft.data.sources.base import SPLITS
from specdraft.embedded.tokenizer import train_tokenizer
from specdraft.targets import Target
from tests.s3 import s3_server, s3_variables

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


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a server that speaks S3."""
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket_url(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket on it; its clients, those of started processes as well, find the server by their usual variables."""
    for name, value in s3_variables(s3).items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"
