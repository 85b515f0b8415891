"""Each family's tiny target in turn, and a plain Llama."""

import pytest
import torch

from specdraft.targets import Target
from tests.data.store.conftest import making
from tests.families import FAMILIES, LENGTH, Family, V

__all__ = ["making"]

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


@pytest.fixture(scope="session", params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="session")
def target(family) -> Target:
    return Target.from_model(family.build())


@pytest.fixture(scope="session")
def llama() -> Target:
    return Target.from_model(FAMILIES["llama"].build())


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """``[2, LENGTH]``."""
    return torch.randint(V, (2, LENGTH), generator=torch.Generator().manual_seed(2))
