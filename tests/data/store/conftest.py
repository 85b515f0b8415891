"""A tiny target, packed sequences of two splits, and what writes a store of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.data.packing import PackedTensor, pack
from specdraft.data.places import Folder
from specdraft.data.store import Contents, Store, StoreWriter, describe
from specdraft.data.tokenization.chat import Example
from specdraft.targets import Features, Target
from specdraft.targets.batch import Batch
from tests.fakes import tiny_llama

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
LAYERS = (1, 3)


def packed(count: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 24, (count,), generator=generator).tolist()
    examples = [
        Example(torch.randint(3, 64, (length,), generator=generator).tolist(), [t >= 4 for t in range(length)])
        for length in lengths
    ]
    return pack(examples, 32)[0]


class Making:
    """The parts of a store of ``batches`` by split, in shards of about two sequences."""

    def __init__(self, target: Target, path: Path) -> None:
        self.target, self.path = target, path
        self.batches = {"train": packed(20, seed=1), "validation": packed(4, seed=2)}
        self.settings = {"limit": 20, "source": {"name": "random"}}

    def features(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Features:
        return self.target.features(input_ids, position_ids, LAYERS)

    def packed(self) -> dict[str, PackedTensor]:
        return {split: PackedTensor.of(batch) for split, batch in self.batches.items()}

    def contents(self, **options: Any) -> Contents:
        about = {split: {"left_out": 0} for split in self.batches}
        defaults = {
            "layers": LAYERS,
            "every_last": True,
            "dtype": "float32",
            "data": self.packed(),
            "settings": self.settings,
            "about": about,
            "shard_bytes": 32 * 3 * 32 * 4 * 2,
        }
        return describe(self.target, **defaults | options)

    def writer(self, path: Path | None = None, **options: Any) -> StoreWriter:
        return StoreWriter(Folder(path or self.path), self.contents(**options), self.packed())

    def store(self, path: Path | None = None, **options: Any) -> Store:
        self.writer(path, **options).write(self.features, 1)
        return Store(path or self.path)


@pytest.fixture
def making(tmp_path: Path) -> Making:
    return Making(Target.from_model(tiny_llama(num_hidden_layers=4), name="tiny"), tmp_path / "states")
