"""Evaluation by real decoding: benchmark prompts, measured acceptance and speed, table and report."""

from specdraft.data.prompts import Prompt, load_prompts
from specdraft.evaluation.evaluator import evaluate
from specdraft.evaluation.report.pages import table, write_report
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.evaluation.speedup.model import CostSettings

__all__ = ["CostSettings", "EvaluationSettings", "Prompt", "evaluate", "load_prompts", "table", "write_report"]
