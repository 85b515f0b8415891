"""Evaluation by real decoding: benchmark prompts, measured acceptance and speed, table and report."""

from specdraft.evaluation.cost_model import CostSettings
from specdraft.evaluation.evaluator import Evaluation, EvaluationSettings, evaluate
from specdraft.evaluation.prompts import Prompt, load_prompts
from specdraft.evaluation.report import write_report
from specdraft.evaluation.table import table

__all__ = [
    "CostSettings",
    "Evaluation",
    "EvaluationSettings",
    "Prompt",
    "evaluate",
    "load_prompts",
    "table",
    "write_report",
]
