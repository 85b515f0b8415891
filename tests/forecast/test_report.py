"""What people read of a forecast."""

import json

import pytest

from specdraft.errors import UserError
from specdraft.forecast import forecast, html, table
from tests.forecast.written import write_run


@pytest.fixture
def runs(tmp_path):
    return [
        write_run(tmp_path / name, lambda n, level=level: level - 0.5 * (n / 2e5) ** -0.4, data__limit=size)
        for name, level, size in (("half", 2.8, 500), ("whole", 3.0, 1000))
    ]


def test_table_and_page_say_what_the_numbers_are(runs):
    found, charts = forecast(runs)
    assert json.loads(json.dumps(found, allow_nan=False)).keys() == found.keys()
    assert found["data"]["sizes"] == [500, 1000] and len(found["comparisons"]) == 1 and found["seed_spread"] is None
    text, page = table(found), html(found, charts)
    for run in found["runs"]:
        for each in run["expectations"]:
            shown = f"{each['acceptance_length']:.2f}"
            assert shown in text and shown in page
    assert "half -> whole: data.limit from 500 to 1000: +0.20" in text
    assert "whole, expected" in page and "<svg" in page and all(line in page for line in ("Kinds of curves", "Hill"))
    assert all(sentence in text for sentence in found["advice"])
    assert [each["run"] for each in found["hindsight"]] == ["half", "whole"]
    assert f"whole: {found['hindsight'][1]['expected']:.2f} [" in text and "10 of 10 later measurements held" in text
    assert "foresaw of its end" in page and "10 of 10" in page
    (chart,) = charts
    assert [len(series.points) for series in chart.drawn] == [4, 3, 4, 3]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"directories": []}, "there are no runs"),
        ({"factors": [0.5]}, r"factors is \[0.5\]: expected a list of numbers of at least 1"),
        ({"factors": [2, "ten"]}, r"factors is \[2, 'ten'\]: expected a list of numbers of at least 1"),
        ({"factors": 3}, "factors is 3: expected a list of numbers of at least 1"),
        ({"worth": "much"}, "worth is much: expected a share"),
        ({"worth": 1.0}, "worth is 1.0: expected a share"),
    ],
)
def test_bad_input(runs, given, said):
    with pytest.raises(UserError, match=said):
        forecast(**({"directories": runs} | given))
