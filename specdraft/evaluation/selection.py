"""Which drafter for these prompts: candidates decode a sample of them in turns, the best another one, and the prompts
that are left tell how good the choice was.

The best of many on a few prompts were lucky as well as fast. So the last ones decode prompts that had no part in
choosing them, and what they do there is what is expected."""

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
    """The ``drafter`` called ``name``, and what every candidate did on the last sample that it decoded (``found``, the
    chosen one's results among them, one for each temperature). finalists: those that decoded the second one. rest: the
    prompts that nobody has decoded."""

    name: str
    drafter: "Drafter"
    found: list[Result]
    finalists: list[str]
    rest: list[Prompt]

    def to_dict(self) -> dict[str, Any]:
        """For ``evaluation.json``: of every candidate and temperature the means on the sample."""
        kept = ("requests", "temperature", "acceptance_length", "speedup", "speedup_interval")
        return {
            "chosen": self.name,
            "finalists": self.finalists,
            "candidates": [
                {"drafter": each.drafter} | {key: each.to_dict()[key] for key in kept} for each in self.found
            ],
        }

    def summary(self) -> str:
        """What every candidate did on the sample, the fastest first, and how sure the choice is."""
        results = {(each.drafter, each.temperature): each.speedup for each in self.found}
        temperatures = sorted({each.temperature for each in self.found})
        names = sorted({each.drafter for each in self.found}, key=self._rank)
        width = max(map(len, names))
        requests = {each.drafter: each.requests for each in self.found}
        lines = [f"drafter=auto: speedups on {requests[names[-1]]} request(s)"]
        if self.finalists:
            lines[0] += f", of {', '.join(self.finalists)} on {requests[self.name]} other(s)"
        lines.append("  " + " " * width + "".join(f"  {f'T={each:g}':<18}" for each in temperatures))
        for name in names:
            lines.append(f"  {name:<{width}}" + "".join(f"  {_shown(results[name, t]):<18}" for t in temperatures))
        alike = [
            name
            for name in self.finalists or names
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
        own = [each for each in self.found if each.drafter == self.name]
        lines = [f"drafter=auto chose {self.name} and expects what it did on {own[0].requests} request(s):"]
        for expected in own:
            measured = evaluation.at(expected.temperature)[0]
            lines.append(
                f"  T={expected.temperature:g}: expected {expected.acceptance_length.value:.2f} tokens a round and "
                f"{expected.speedup.value:.2f} times plain speed, measured {measured.acceptance_length.value:.2f} and "
                f"{_shown(measured.speedup)} times plain speed"
            )
        return "\n".join(lines)

    def _rank(self, name: str) -> tuple[bool, float]:
        """Finalists first, the fastest first."""
        return name not in self.finalists, -_speed(self.found, name)


def _speed(found: Sequence[Result], name: str) -> float:
    """The logarithm of the mean over temperatures, but for a factor."""
    return sum(math.log(each.speedup.value) for each in found if each.drafter == name)


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

    def __init__(self, candidates: "Mapping[str, Drafter]", prompts: int = 8, finalists: int = 3) -> None:
        """``candidates`` need no training, by name; those that read the text alone are also tried before each trained
        one. ``prompts``: that all decode; ``finalists``: how many then decode twice as many others, as far as half of
        the prompts go; 0: the first sample decides. Raises UserError for none of candidates and prompts."""
        if prompts < 1 or finalists < 0 or not candidates:
            raise UserError(
                f"drafter=auto has {len(candidates)} candidates, a sample of {prompts} prompts and {finalists} "
                "finalists: expected at least one candidate and prompt, and finalists or 0"
            )
        self.candidates, self.prompts, self.finalists = dict(candidates), prompts, finalists

    def plan(self, trained: "Mapping[str, Drafter]", prompts: Sequence[Prompt]) -> str:
        """What ``choose`` and the evaluation after it are going to do. Raises UserError for fewer than two prompts."""
        first, second = self._sample_sizes(prompts)
        steps = f"{len(self._ways(trained))} drafters decode {first} prompt(s) in turns"
        steps += f", the best {self.finalists} then {second} other(s)" if second else ""
        return f"drafter=auto: {steps}, and the chosen one the {len(prompts) - first - second} that are left"

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
        first, second = self._sample_sizes(prompts)
        order = categories_first(prompts)
        ways, settings = self._ways(trained), replace(settings, samples=0)

        def decoded(names: Sequence[str], numbers: Sequence[int]) -> list[Result]:
            taking, sample = {name: ways[name] for name in names}, [prompts[number] for number in numbers]
            for drafter in taking.values():
                drafter.forget()
            front, *others = names
            beside = {name: taking[name] for name in others}
            found = evaluate(target, taking[front], sample, settings, beside, progress=progress, engine=engine).results
            found = [each for each in found if not each.beside]
            return [replace(each, drafter=each.drafter if each.drafter in beside else front) for each in found]

        def fastest(found: Sequence[Result]) -> list[str]:
            return sorted({each.drafter for each in found}, key=lambda name: _speed(found, name), reverse=True)

        found = decoded(list(ways), order[:first])
        finalists = fastest(found)[: self.finalists] if second else []
        if finalists:
            last = decoded(finalists, order[first : first + second])
            found = [*last, *(each for each in found if each.drafter not in finalists)]
        best = fastest([each for each in found if not finalists or each.drafter in finalists])[0]
        ways[best].forget()
        rest = [prompts[number] for number in sorted(order[first + second :])]
        return Choice(best, ways[best], found, finalists, rest)

    def _sample_sizes(self, prompts: Sequence[Prompt]) -> tuple[int, int]:
        """How many prompts all decode, and how many others the finalists: half of all together, at most."""
        if len(prompts) < 2:
            raise UserError(f"drafter=auto has {len(prompts)} prompt to choose and measure with: expected at least 2")
        half = len(prompts) // 2
        first = min(self.prompts, half if half < 2 or not self.finalists else half // 2)
        return first, min(2 * self.prompts, half - first) if self.finalists else 0

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
