"""Templates: nothing is missing, nothing is left unescaped."""

import pytest
from jinja2 import UndefinedError

from specdraft.rendering import render


def test_a_missing_value_is_an_error():
    with pytest.raises(UndefinedError, match="'segments' is undefined"):
        render("evaluation/report/templates/answer.html.jinja")


def test_values_are_escaped():
    assert "<span>&lt;b&gt;</span>" in render(
        "evaluation/report/templates/answer.html.jinja", segments=[{"text": "<b>", "status": "own"}]
    )
