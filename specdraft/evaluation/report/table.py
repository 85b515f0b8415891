"""The evaluation as plain text of 80 columns: it must survive a log file and a narrow terminal."""

from textwrap import TextWrapper

from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.report.rendering import render

_LINES = TextWrapper(80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def table(evaluation: Evaluation) -> str:
    """All results: a block per temperature, then the categories. Only a word of more than 80 columns is wider."""
    lines = render("table.txt.jinja", evaluation=evaluation).strip().splitlines()
    return "\n".join(_LINES.fill(line) for line in lines)
