"""Every notebook runs from top to bottom, as a reader would run it: the first trains what others look at."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FIRST, *OTHERS = sorted(NOTEBOOKS.glob("*.ipynb"))


def execute(path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    return notebook


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("wandb")))
        return execute(FIRST)


def test_the_first_runs(quickstart):
    assert all(cell.execution_count for cell in quickstart.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_it_runs_after_the_first(quickstart, path):
    assert all(cell.execution_count for cell in execute(path).cells if cell.cell_type == "code")


def test_there_are_five():
    assert len(OTHERS) == 4


@pytest.mark.parametrize("path", [FIRST, *OTHERS], ids=lambda path: path.stem)
def test_it_is_stored_with_what_a_run_showed(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and not any(output.get("name") == "stderr" or output.output_type == "error" for output in outputs)
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000 and str(NOTEBOOKS.parent) not in text and "/tmp/" not in text
