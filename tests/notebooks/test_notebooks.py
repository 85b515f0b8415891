"""Every notebook runs from top to bottom, as a reader would run it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_runs(path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("WANDB_MODE", "offline")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def test_there_are_five():
    assert len(list(NOTEBOOKS.glob("*.ipynb"))) == 5
