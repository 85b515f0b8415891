"""What an evaluation found, and what a reader needs to trust or repeat it, as ``evaluation.json`` holds it."""

import json
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdraft.evaluation import environment
from specdraft.evaluation.results import Result
from specdraft.evaluation.speedup.advice import Advice
from specdraft.evaluation.speedup.model import CostModel
from specdraft.files import atomic_file


@dataclass(frozen=True)
class Evaluation:
    """All results, and what a reader needs to trust or repeat them. ``results[0]`` is the drafter under test."""

    settings: dict[str, Any]
    results: list[Result]
    categories: list[Result]
    distinct_4gram: dict[float, float]  # by temperature, of the baseline's generations
    samples: list[dict[str, Any]] = field(default_factory=list)  # drafter, temperature, category, question, segments
    cost_models: list[CostModel] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)  # what was really measured of what is predicted
    advice: list[Advice] = field(default_factory=list)  # a drafter each
    machine: dict[str, Any] = field(default_factory=environment.machine)
    versions: dict[str, str] = field(default_factory=environment.versions)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def at(self, temperature: float) -> list[Result]:
        """The results at one temperature, the drafter under test first."""
        return [result for result in self.results if result.temperature == temperature]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; numbers that are undefined or infinite are None."""
        return _finite(
            {
                "created": self.created,
                "settings": self.settings,
                "machine": self.machine,
                "versions": self.versions,
                "baseline": [
                    {
                        "temperature": temperature,
                        "distinct_4gram": share,
                        "tokens": alone.baseline_tokens,
                        "tokens_per_second": alone.baseline_tokens_per_second,
                        "target_step_seconds": alone.target_step_seconds,
                    }
                    for temperature, share in self.distinct_4gram.items()
                    for alone in self.at(temperature)[:1]
                ],
                "results": [result.to_dict() for result in self.results],
                "categories": [result.to_dict() for result in self.categories],
                "cost_models": [model.to_dict() for model in self.cost_models],
                "checks": self.checks,
                "advice": [advice.to_dict() for advice in self.advice],
                "samples": self.samples,
            }
        )

    def write_json(self, path: Path) -> Path:
        """Write ``to_dict()`` to ``path``; the file is whole or absent."""
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
