"""The promise of docs/versions.md: what an earlier version wrote is read, and decodes as it did then."""

import json

import pytest
import torch
import yaml

import specdraft
from specdraft.drafters.checkpoint import check_target, load_drafter
from tests.versions.write import EXPECTED, FAMILIES, FOLDER, decode, main, target

REPOSITORY = FOLDER.parents[1]
CHECKPOINTS = sorted(path.parent for path in FOLDER.glob(f"*/*/{EXPECTED}"))
RELEASED = {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name[0].isdigit()}


def test_this_version_and_every_family_are_kept():
    assert specdraft.__version__ in RELEASED
    kept = {path.name for path in CHECKPOINTS if path.parent.name == specdraft.__version__}
    assert kept == set(FAMILIES)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_decodes_as_it_did(path):
    drafter, config = load_drafter(path)
    check_target(config, target())
    assert decode(drafter) == json.loads((path / EXPECTED).read_text())


def test_every_file_that_names_the_version_names_this_one():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert citation["version"] == specdraft.__version__ and f"\n## {specdraft.__version__}\n" in changes


def test_a_weight_that_is_read_otherwise_shows():
    path = next(path for path in CHECKPOINTS if path.name == "eagle3")
    drafter, _ = load_drafter(path)
    with torch.no_grad():
        drafter.get_parameter("fc.weight").mul_(-1)
    assert decode(drafter) != json.loads((path / EXPECTED).read_text())


def test_what_was_released_is_not_written_again():
    with pytest.raises(SystemExit, match="expected a new version"):
        main()
