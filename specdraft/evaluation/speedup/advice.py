"""From the cost model to a plain sentence: with which setting to serve, what to expect, when to turn drafting off."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdraft.decoding.shapes import DynamicTree, Shape
from specdraft.evaluation.results import Estimate, Result
from specdraft.evaluation.speedup.model import CostModel
from specdraft.export.engine import SAMPLED, Engine
from specdraft.export.vllm import VLLM


@dataclass(frozen=True)
class Advice:
    """For one drafter. num_speculative_tokens: of a chain, what every engine takes; None: better not to draft.
    drafting: how drafts were made above temperature 0. batch_size: requests side by side that the advice is for.
    expected: speedup of decoding there, by temperature.
    gains_up_to, loses_from: batch sizes that were tried. longest: whether longer drafts than were evaluated might do
    better still. vllm: the options of its command line, if it drafts so. undecided: by temperature, the measured
    speedup of the whole answers, where its interval holds 1: so few prompts do not tell whether drafting pays.
    otherwise: the same where the advised chain was decoded and the interval does not hold what is expected. tree: the
    options of a dynamic tree that gains more than any chain, at the first temperature, and its ``speedup``."""

    drafter: str
    drafting: str
    num_speculative_tokens: int | None
    expected: dict[str, float]
    gains_up_to: int
    loses_from: int | None
    longest: bool
    vllm: str | None
    undecided: dict[str, str] = field(default_factory=dict)
    otherwise: dict[str, str] = field(default_factory=dict)
    batch_size: int = 1
    tree: dict[str, float] | None = None

    @property
    def sentence(self) -> str:
        """The advice in words."""
        how = {t: f" with {self.drafting} drafts" if float(t) else "" for t in self.expected}
        figures = [f"{gain:.2f} times as fast at temperature {t}{how[t]}" for t, gain in self.expected.items()]
        several = f", {self.batch_size} requests side by side" if self.batch_size > 1 else ""
        expected = " and ".join(figures) + several
        if self.num_speculative_tokens is None:
            return f"Do not draft with {self.drafter} here: the best chain is expected to decode {expected}."
        k = self.num_speculative_tokens
        start = f"Draft {k} token{'s' if k > 1 else ''} a round with {self.drafter} and expect to decode {expected}"
        if self.loses_from is None:
            end = f"; drafting still gains at {self.gains_up_to} requests side by side, the most that were tried."
        else:
            end = f"; turn it off from {self.loses_from} requests side by side, where no chain gains."
        more = " It is the longest draft that was measured: a longer one may gain more." if self.longest else ""
        losing = " and ".join(t for t, gain in self.expected.items() if gain < 1)
        unless = f" At temperature {losing} it loses: do not draft there." if losing else ""
        open_, other = (
            " and ".join(f"{measured} at temperature {t}" for t, measured in found.items())
            for found in (self.undecided, self.otherwise)
        )
        unsure = f" These prompts do not decide whether it pays: whole answers measured {open_}." if open_ else ""
        unlike = f" Whole answers so drafted measured {other}, prompts included: trust that figure." if other else ""
        tree = ""
        if self.tree is not None:
            depth, top_k, nodes, gain = self.tree.values()
            shape = f"A tree of {nodes} nodes, {depth} levels of at most {top_k} each,"
            tree = f" {shape} is expected to decode {gain:.2f} times as fast, where the engine verifies trees."
        return start + end + more + tree + unless + unsure + unlike

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "sentence": self.sentence}


def advise(
    models: Sequence[CostModel],
    family: str,
    drafting: str = SAMPLED,
    engine: Engine | None = None,
    results: Sequence[Result] = (),
    batch_size: int = 1,
    shape: Shape | None = None,
) -> Advice | None:
    """Advice from the models of one drafter, the first temperature deciding; None where no chain was predicted.
    family: which kind of drafter it is, whatever its name; drafting: of the models above temperature 0. vLLM's options
    are given for what it serves, unless the advice is for another engine. results: what was measured of the drafter.
    batch_size: the requests side by side for which K is chosen. shape: what was decoded at the first temperature."""
    first = models[0]
    best = first.best(batch_size)
    if best is None:
        return None
    k, gains = best.tokens, best.speedup > 1
    expected = {
        f"{model.temperature:g}": each.speedup
        for model in models
        for each in model.predictions
        if (each.batch_size, each.kind, each.tokens) == (batch_size, "chain", k)
    }
    loses = first.loses_from()
    gaining = [size for size in first.target_step_seconds if loses is None or size < loses]
    longest = max(each.tokens for each in first.predictions if each.kind == "chain")
    for_vllm = gains and (engine is None or isinstance(engine, VLLM))
    options = VLLM.options(family, "EXPORT_DIRECTORY", k, drafting) if for_vllm else None
    vllm = shlex.join(options) if options else None
    served, most = k if gains else None, max(gaining, default=0)
    known = (each for each in results if each.speedup.interval and math.isfinite(each.speedup.interval[0]))
    measured = {f"{each.temperature:g}": each for each in known if not each.beside}
    undecided = {t: _said(each.speedup) for t, each in measured.items() if _holds(each.speedup, 1)}
    otherwise = {
        t: _said(measured[t].speedup)
        for t, gain in expected.items()
        if t in measured and t not in undecided and _chain(measured[t]) == k and not _holds(measured[t].speedup, gain)
    }
    tree = None
    if gains and isinstance(shape, DynamicTree):
        same = [each for each in first.predictions if (each.batch_size, each.draft) == (batch_size, str(shape))]
        gained = max((each.speedup for each in same), default=0.0)
        tree = asdict(shape) | {"speedup": gained} if gained > best.speedup else None
    said = (undecided, otherwise, batch_size, tree)
    return Advice(first.drafter, drafting, served, expected, most, loses, longest == k, vllm, *said)


def _holds(measured: Estimate, value: float) -> bool:
    low, high = measured.interval or (-math.inf, math.inf)
    return low <= value <= high


def _said(measured: Estimate) -> str:
    low, high = measured.interval or (-math.inf, math.inf)
    return f"{measured.value:.2f} [{low:.2f}, {high:.2f}]"


def _chain(result: Result) -> int | None:
    """How long the chains were that were decoded; None for trees, and for chains of several lengths."""
    k = result.counts.num_draft_tokens
    return k if abs(result.nodes_per_round - k) < 0.5 else None  # nan where there was no round
