"""Which drafter for these prompts: candidates decode a sample of them in turns, and the others tell how good the choice
was."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specdraft.data.prompts import Prompt, categories_first
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.text_drafter import TextDrafter
from specdraft.errors import UserError
from specdraft.evaluation.evaluation import Evaluation
from specdraft.evaluation.evaluator import evaluate
from specdraft.evaluation.results import Estimate, Result
from specdraft.evaluation.settings import EvaluationSettings
from specdraft.export.engine import Engine

if TYPE_CHECKING:
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target


@dataclass(frozen=True)
class Choice:
    """The ``drafter`` called ``name``, and what every candidate did on the sample (``found``, the chosen one's results
    among them, one for each temperature). rest: the prompts that nobody has decoded."""

    name: str
    drafter: "Drafter"
    found: list[Result]
    rest: list[Prompt]

    def to_dict(self) -> dict[str, Any]:
        """For ``evaluation.json``: of every candidate and temperature the means on the sample."""
        kept = ("temperature", "acceptance_length", "speedup", "speedup_interval")
        return {
            "chosen": self.name,
            "requests": self.found[0].requests,
            "candidates": [
                {"drafter": each.drafter} | {key: each.to_dict()[key] for key in kept} for each in self.found
            ],
        }

    def summary(self) -> str:
        """What every candidate did on the sample, the fastest first, and how sure the choice is."""
        results = {(each.drafter, each.temperature): each.speedup for each in self.found}
        temperatures = sorted({each.temperature for each in self.found})
        names = sorted({each.drafter for each in self.found}, key=self._mean_speed, reverse=True)
        width = max(map(len, names))
        requests = self.found[0].requests
        lines = [f"drafter=auto on a sample of {requests} request(s) of {requests + len(self.rest)}, speedups:"]
        lines.append("  " + " " * width + "".join(f"  {f'T={each:g}':<18}" for each in temperatures))
        for name in names:
            lines.append(f"  {name:<{width}}" + "".join(f"  {_shown(results[name, t]):<18}" for t in temperatures))
        alike = [
            name
            for name in names
            if name != self.name and all(_overlap(results[name, t], results[self.name, t]) for t in temperatures)
        ]
        verdict = f"chosen: {self.name}, by the geometric mean of its speedups"
        if alike:
            verdict += f"; the sample does not decide between it and {', '.join(alike)}"
        if all(_overlap(results[self.name, t], Estimate(1.0, (1.0, 1.0))) for t in temperatures):
            verdict += "; nor is it certain that it pays at all" if alike else "; it is not certain that it pays at all"
        return "\n".join(line.rstrip() for line in [*lines, verdict])

    def compared_with(self, evaluation: Evaluation) -> str:
        """What was expected beside what ``evaluation`` of the others measured, a line for each temperature."""
        lines = [f"drafter=auto chose {self.name} on a sample of {self.found[0].requests} request(s):"]
        for expected in (each for each in self.found if each.drafter == self.name):
            measured = evaluation.at(expected.temperature)[0]
            lines.append(
                f"  T={expected.temperature:g}: expected {expected.acceptance_length.value:.2f} tokens a round and "
                f"{expected.speedup.value:.2f} times plain speed, measured {measured.acceptance_length.value:.2f} and "
                f"{_shown(measured.speedup)} times plain speed"
            )
        return "\n".join(lines)

    def _mean_speed(self, name: str) -> float:
        return sum(math.log(each.speedup.value) for each in self.found if each.drafter == name)


def _shown(speedup: Estimate) -> str:
    around = "" if speedup.interval is None else f" [{speedup.interval[0]:.2f}, {speedup.interval[1]:.2f}]"
    return f"{speedup.value:.2f}{around}"


def _overlap(one: Estimate, other: Estimate) -> bool:
    """Whether the intervals of both leave open which is greater."""
    if one.interval is None or other.interval is None:
        return True
    return one.interval[0] <= other.interval[1] and other.interval[0] <= one.interval[1]


class Selection:
    """How ``drafter=auto`` chooses."""

    def __init__(self, candidates: "Mapping[str, Drafter]", prompts: int = 8) -> None:
        """``candidates`` need no training, by name; those that read the text alone are also tried before each trained
        one. ``prompts``: of the sample. Raises UserError for none of either."""
        if prompts < 1 or not candidates:
            raise UserError(
                f"drafter=auto has {len(candidates)} candidates and a sample of {prompts} prompts: expected at least "
                "one of each"
            )
        self.candidates, self.prompts = dict(candidates), prompts

    def plan(self, trained: "Mapping[str, Drafter]", prompts: Sequence[Prompt]) -> str:
        """What ``choose`` and the evaluation after it are going to do. Raises UserError for fewer than two prompts."""
        size = self._sample_size(prompts)
        then = f"then the chosen one decodes the other {len(prompts) - size}"
        return f"drafter=auto: {len(self._ways(trained))} drafters decode {size} prompt(s) in turns, {then}"

    def choose(
        self,
        target: "Target",
        trained: "Mapping[str, Drafter]",
        prompts: Sequence[Prompt],
        settings: EvaluationSettings,
        engine: Engine | None = None,
        progress: bool = True,
    ) -> Choice:
        """The one whose speedup on the sample, as a geometric mean over ``settings.temperatures``, is the highest.
        ``trained``: drafters of this target, by name. Raises UserError for fewer than two prompts."""
        order = categories_first(prompts)
        size = self._sample_size(prompts)
        sample, rest = [prompts[index] for index in order[:size]], [prompts[index] for index in sorted(order[size:])]
        ways = self._ways(trained)
        first, *others = ways
        beside = {name: ways[name] for name in others}
        settings = replace(settings, samples=0)
        found = evaluate(target, ways[first], sample, settings, beside, progress=progress, engine=engine).results
        own = [replace(each, drafter=each.drafter if each.drafter in beside else first) for each in found]
        own = [each for each in own if not each.beside]
        best = max(ways, key=lambda name: sum(math.log(each.speedup.value) for each in own if each.drafter == name))
        ways[best].forget()
        return Choice(best, ways[best], own, rest)

    def _sample_size(self, prompts: Sequence[Prompt]) -> int:
        if len(prompts) < 2:
            raise UserError(
                f"drafter=auto has {len(prompts)} prompt to choose and to measure with: expected at least 2"
            )
        return min(self.prompts, len(prompts) // 2)

    def _ways(self, trained: "Mapping[str, Drafter]") -> "dict[str, Drafter]":
        """By name. Each look-up before a drafter is another object than it is alone: it would know the answers."""
        ways: dict[str, Drafter] = dict(trained)
        for name, each in self.candidates.items():
            ways[name] = each
            if isinstance(each, TextDrafter):
                before = {
                    f"{name}, else {head}": Hybrid(drafter, copy.deepcopy(each)) for head, drafter in trained.items()
                }
                ways |= before
        return ways
