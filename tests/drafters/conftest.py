"""A tiny random target in fp64, so that equalities are equalities."""

import pytest
import torch

from specdraft.targets import Target
from specdraft.targets.batch import Batch
from tests.drafters.drafts import tokenizer_of
from tests.fakes import tiny_llama


@pytest.fixture(autouse=True, scope="module")
def every_layer_packed(small_layers_packed_too):
    """As those of real models are."""


@pytest.fixture(scope="session")
def target() -> Target:
    options = {"num_hidden_layers": 6, "initializer_range": 0.3, "tie_word_embeddings": False}
    return Target.from_model(tiny_llama(97, 128, **options).double())


@pytest.fixture
def packed() -> Batch:
    """Two sequences: documents of 9 + 14 tokens, and of 20 tokens with padding; answers after prompts."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 97, (2, 23), generator=g)
    documents = torch.tensor([[0] * 9 + [1] * 14, [0] * 20 + [-1] * 3])
    positions = torch.tensor([[*range(9), *range(14)], [*range(20), *range(3)]])
    mask = torch.tensor([[0] * 3 + [1] * 6 + [0] * 5 + [1] * 9, [0] * 4 + [1] * 6 + [0] * 3 + [1] * 7 + [0] * 3])
    return Batch(tokens, positions, documents, mask.bool())


@pytest.fixture
def sibling(tmp_path):
    """Saves a random sibling of 64 tokens and returns its directory."""

    def save(tokenizer=None, **options) -> str:
        directory = str(tmp_path / "sibling")
        tiny_llama(seed=5, **{"num_hidden_layers": 3, "hidden_size": 16} | options).save_pretrained(directory)
        (tokenizer or tokenizer_of(64)).save_pretrained(directory)
        return directory

    return save


@pytest.fixture
def small() -> Target:
    return Target.from_model(tiny_llama().double(), tokenizer_of(64))
