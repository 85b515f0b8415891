"""What is said of the levers."""

from specdraft.forecast.advice import advise
from specdraft.forecast.levers import compare, data_curve
from specdraft.forecast.outlook import make_outlook


def test_what_pays_most_and_what_is_not_known(make):
    large = make("large", 3.0)
    outlooks = [make_outlook(large, [2], 0.01)]
    said = advise([large], outlooks, [], None)
    assert any("train one like large with data.limit=500" in each for each in said)
    assert any("one option of model.drafter" in each for each in said)
    runs = [make(f"data-{size}", level, data__limit=size) for size, level in ((250, 1.4), (500, 2.2))]
    runs += [large, make("wide", 3.05, model__drafter__num_layers=2)]
    outlooks = [make_outlook(each, [2], 0.01) for each in runs]
    said = advise(runs, outlooks, list(compare(runs)), data_curve(runs))
    assert not any("no two runs tell" in each for each in said)
    assert any(each.startswith("most pays twice the data") for each in said), said
