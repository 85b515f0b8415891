import json

import pytest

from tests.reference.curves import COLUMNS, FAMILIES, FOLDER, curve

# With the instructions of ten years of processors (ATEN_CPU_CAPABILITY, MKL_CBWR) the curves differed by up to 3e-6.
TOLERANCE = 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_steps_are_those_written_down(family, tmp_path):
    expected = json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))
    found = curve(family, tmp_path)
    assert {name: len(values) for name, values in found.items()} == dict(zip(COLUMNS, (20, 20, 20, 2), strict=True))
    for name in COLUMNS:
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE), f"{name}: if meant, run make reference"
