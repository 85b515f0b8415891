"""Which charts there are, with which values; and all of them as PNG files."""

import sys

import pytest

from specdraft.errors import UserError
from specdraft.evaluation.report.charts import (
    all_charts,
    cost_charts,
    overview_charts,
    temperature_charts,
    write_png,
)
from tests.evaluation.written import evaluation


def values(series):
    return {point.x: point.y for point in series.points}


def test_speedup_by_length_size_and_batch():
    chain, tree, batch = cost_charts(evaluation())
    assert [each.name for each in chain.drawn] == [
        "eagle3, temperature 0",
        "eagle3, temperature 0, measured",
        "eagle3, temperature 1",
    ]
    modeled, measured, other = chain.drawn
    assert values(modeled) == pytest.approx({1: 1.2, 2: 1.3, 3: 1.4}) and values(measured) == {3: 1.3}
    assert modeled.number == measured.number == 0 and other.number == 1 and not measured.line
    assert [each.name for each in tree.drawn] == ["eagle3, temperature 0", "eagle3, temperature 1"]
    assert values(batch.drawn[0]) == pytest.approx({1: 1.4, 4: 1.175})
    assert chain.one and tree.one and batch.one


def test_without_a_cost_model_or_other_batch_sizes_there_is_no_such_chart():
    assert list(cost_charts(evaluation() | {"cost_models": [], "checks": []})) == []
    alone = evaluation()
    for model in alone["cost_models"]:
        model["predictions"] = [each for each in model["predictions"] if each["batch_size"] == 1]
    assert [chart.label for chart in cost_charts(alone)] == ["drafted tokens K", "nodes of the tree"]


def test_drafters_side_by_side():
    recorded = evaluation()
    results = recorded["results"]
    results[0]["speedup"] = None
    length, speedup = overview_charts(results)
    assert length.places == speedup.places == ["temperature 0", "temperature 1"]
    assert [values(each) for each in length.series] == [{"temperature 0": 2.1, "temperature 1": 2.1}] * 2
    assert values(speedup.drawn[0]) == {"temperature 1": 2.1}
    assert length.series[0].points[0].interval == [1.8, 2.4]
    assert list(overview_charts(results[:1])) == []


def test_acceptance_at_a_temperature():
    recorded = evaluation()
    recorded["results"][0]["conditional_acceptance_rate"] = [0.6, 0.66, None]
    position, histogram, category = temperature_charts(recorded, 0.0)
    assert values(position.drawn[0]) == {1: 0.6, 2: 0.66} and position.drawn[0].points[1].interval == [0.4, 0.8]
    assert values(histogram.drawn[0]) == pytest.approx({0: 0.4, 1: 0.2, 2: 0.3, 3: 0.1})
    assert category.places == ["code", "chat"] and category.start == 1.0
    assert [each.name for each in category.drawn] == ["eagle3", "prompt_lookup"]
    recorded["categories"] = []
    recorded["results"][0]["rounds"] = 0
    _, histogram = temperature_charts(recorded, 0.0)
    assert [each.name for each in histogram.drawn] == ["prompt_lookup"]


def test_every_chart_says_its_temperature():
    captions = [chart.caption for chart in all_charts(evaluation())]
    assert len(captions) == len(set(captions)) == 11
    assert [caption.rpartition(", ")[2] for caption in captions[5:]] == ["temperature 0"] * 3 + ["temperature 1"] * 3


def test_png_files(tmp_path):
    pytest.importorskip("resvg_py")
    paths = write_png(evaluation(), tmp_path)
    assert len(paths) == 11 and all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert paths[0].name == "01-by-length-of-the-chain-one-request.png" and paths[0].stat().st_size > 5000


def test_without_the_library_png_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UserError, match="pip install 'specdraft\\[plots\\]'"):
        write_png(evaluation(), tmp_path)
    assert list(tmp_path.iterdir()) == []
