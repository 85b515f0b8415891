"""Exports that are read back."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdraft.drafters.base import Drafter
from specdraft.export import export


@pytest.fixture
def read_back(save, tmp_path):
    """read_back(imported, engine, directory): exported again, every file that is served is the same, byte by byte."""

    def check(imported: Drafter, engine, directory: Path) -> None:
        again = export(save(imported), engine, tmp_path / "again")
        served = [path.name for path in directory.iterdir() if path.name not in ("README.md", "target.json")]
        assert len(served) >= 2
        for name in served:
            assert (again / name).read_bytes() == (directory / name).read_bytes(), name

    return check


@pytest.fixture
def edit():
    """edit(directory, config changes, change of the tensors): rewrite an export in place. None removes a key."""

    def change(directory: Path, config=None, tensors=None) -> None:
        path = directory / "config.json"
        known = json.loads(path.read_text()) | (config or {})
        path.write_text(json.dumps({key: value for key, value in known.items() if value is not None}))
        if tensors is not None:
            weights = next(directory.glob("*.safetensors"))
            save_file(tensors(load_file(weights)), weights)

    return change
