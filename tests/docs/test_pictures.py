"""The pictures are drawn from what they show."""

import runpy
from pathlib import Path

import pytest

from tests.architecture.graph import FLOORS, import_graph

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures():
    return runpy.run_path(str(DOCS / "pictures.py"))["PICTURES"]


def test_the_house_shows_every_room_and_counts_its_imports(pictures):
    drawn = pictures["architecture"]().svg()
    assert all(f">{room}" in drawn for floor in FLOORS for room in floor)
    graph = import_graph()
    arrows = sum(
        other.startswith("specdraft.targets")
        for name, others in graph.items()
        if name.startswith("specdraft.drafters")
        for other in others
    )
    assert f"targets {arrows}," in drawn.partition(">drafters, ")[2].partition("</text><rect")[0]


def test_every_picture_is_on_disk(pictures):
    assert {f"{name}.svg" for name in pictures} <= {path.name for path in (DOCS / "images").glob("*.svg")}
    for name, draw in pictures.items():
        assert draw().svg().startswith("<svg") and (name == "architecture" or _same(name, draw))


def _same(name, draw):
    return (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == draw().svg()
