"""What an evaluation found, and what a reader needs to trust or repeat it, as ``evaluation.json`` holds it."""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import specdraft
from specdraft.evaluation.results import Result
from specdraft.evaluation.speedup.advice import Advice
from specdraft.evaluation.speedup.model import CostModel
from specdraft.evaluation.speedup.roofline import Roofline
from specdraft.files import write_text


def machine() -> dict[str, str | int | float | None]:
    """Processor, cores, threads, memory and accelerator of this machine: speeds mean nothing without it."""
    about = Path("/proc/cpuinfo")  # of Linux
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.platform(),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    modules = {"specdraft": specdraft, "torch": torch, "transformers": transformers}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in modules.items()}}


@dataclass(frozen=True)
class Evaluation:
    """All results, and what a reader needs to trust or repeat them. ``results[0]`` is the drafter under test."""

    settings: dict[str, Any]
    results: list[Result]
    categories: list[Result]
    distinct_4gram: dict[float, float]  # by temperature, of the baseline's generations
    roofline: Roofline | None = None  # of the target's step
    samples: list[dict[str, Any]] = field(default_factory=list)  # drafter, temperature, category, question, segments
    cost_models: list[CostModel] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)  # what was really measured of what is predicted
    advice: list[Advice] = field(default_factory=list)  # a drafter each
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def at(self, temperature: float) -> list[Result]:
        """The results at one temperature, the drafter under test first."""
        return [result for result in self.results if result.temperature == temperature]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; numbers that are undefined or infinite are None."""
        baseline = [
            {
                "temperature": temperature,
                "distinct_4gram": share,
                "tokens": alone.baseline_tokens,
                "tokens_per_second": alone.baseline_tokens_per_second,
                "target_step_seconds": alone.target_step_seconds,
            }
            for temperature, share in self.distinct_4gram.items()
            for alone in self.at(temperature)[:1]
        ]
        plain = {name: getattr(self, name) for name in ("created", "settings", "machine", "versions")}
        lists = {name: getattr(self, name) for name in ("results", "categories", "cost_models", "advice")}
        plain["roofline"] = self.roofline and asdict(self.roofline) | {"step_seconds": self.roofline.step_seconds}
        written = {name: [each.to_dict() for each in found] for name, found in lists.items()}
        return _finite({**plain, "baseline": baseline, **written, "checks": self.checks, "samples": self.samples})

    def write_json(self, path: Path) -> Path:
        """Write ``to_dict()`` to ``path``; the file is whole or absent."""
        return write_text(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
