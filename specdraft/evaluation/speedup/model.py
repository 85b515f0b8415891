"""The cost model: from measured acceptance and measured step times to the speedup of drafts that were not decoded.

K = drafted tokens, b = requests decoded side by side, a_i = conditional acceptance rate at position i,
V(b, n) = seconds of the target's pass over n tokens of each of b requests, D(b, K) = seconds of drafting.

- A chain emits tau(K) = 1 + sum_{i <= K} prod_{j <= i} a_j tokens a round; with one rate for all positions that is
  Leviathan et al. (2211.17192), equation 1. A tree emits 1 + the sum over its nodes of the probability that the node is
  accepted (Medusa, 2401.10774, section 2.3.3; EAGLE-2, 2406.16858; Sequoia, 2402.12374).
- Both take rates to be the same for every shape. They are not: rounds begin where the one before failed, so longer
  drafts spend more of their rounds in hard places. At temperature 0 the rounds of another shape are therefore replayed
  on the ranks that the drafter gave to the tokens of the target's answers (``replayed_acceptance_length``), and scaled
  by what was really decoded.
- Speedup of decoding S = tau * V(b, 1) / (V(b, n + 1) + D). With V(b, n + 1) = V(b, 1) and D = K c V(b, 1) it is
  Leviathan et al., theorem 3.8; with V as measured, by n and b, it is Sequoia's hardware-aware choice of the tree.

The prompt's pass, which drafting does not change, is left out. What is predicted is this loop on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from specdraft.decoding.metrics import predicted_speedup
from specdraft.decoding.shapes import Shape, StaticTree
from specdraft.errors import UserError
from specdraft.evaluation.speedup.step_times import Cell, StepTime


@dataclass(frozen=True)
class CostSettings:
    """What to predict, and how long to measure step times for it.
    batch_sizes: requests side by side. tree_sizes: nodes of the static trees to consider at temperature 0. seconds: for
    the step times of a drafter at a temperature. check: decode all prompts with every draft that is predicted, too, and
    time the steps for as many seconds after each of them."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    tree_sizes: tuple[int, ...] = (8, 16)
    seconds: float = 4.0
    check: bool = False

    def __post_init__(self) -> None:
        """Raises UserError for sizes below 1; a batch size of 1 is always among them."""
        for name in ("batch_sizes", "tree_sizes"):
            values = getattr(self, name)
            if not all(isinstance(value, int) and value >= 1 for value in values):
                raise UserError(f"cost_model.{name} is {list(values)}: expected whole numbers of at least 1")
        object.__setattr__(self, "batch_sizes", tuple(sorted({1, *self.batch_sizes})))
        object.__setattr__(self, "tree_sizes", tuple(sorted(set(self.tree_sizes))))


@dataclass(frozen=True)
class Prediction:
    """What a draft is expected to bring. seconds: of a round; tokens: drafted, the nodes of a tree."""

    batch_size: int
    draft: str
    kind: str  # "chain" or "tree"
    tokens: int
    acceptance_length: float
    draft_seconds: float
    verify_seconds: float
    speedup: float


@dataclass(frozen=True)
class CostModel:
    """All predictions for one drafter at one temperature. target_step_seconds: V(b, 1) by batch size."""

    drafter: str
    temperature: float
    target_step_seconds: dict[int, float]
    predictions: list[Prediction]

    def best(self, batch_size: int, kind: str | None = "chain") -> Prediction | None:
        """The fastest draft of this kind, or of all; None if none was considered."""
        chosen = [each for each in self.predictions if each.batch_size == batch_size and kind in (each.kind, None)]
        return max(chosen, key=lambda each: each.speedup, default=None)

    def loses_from(self, kind: str = "chain") -> int | None:
        """The smallest batch size at and beyond which no draft of this kind gains; None if the largest still gains."""
        losing = None
        for batch_size in sorted(self.target_step_seconds, reverse=True):
            best = self.best(batch_size, kind)
            if best is not None and best.speedup > 1:
                break
            losing = batch_size
        return losing

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``best`` and ``loses_from`` are those of chains, which every engine serves."""
        best = {str(b): found.tokens for b in self.target_step_seconds if (found := self.best(b)) is not None}
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "target_step_seconds": {str(b): seconds for b, seconds in self.target_step_seconds.items()},
            "best_num_draft_tokens": best,
            "loses_from_batch_size": self.loses_from(),
            "predictions": [asdict(each) for each in self.predictions],
        }


def chain_acceptance_length(rates: Sequence[float]) -> float:
    """Tau of a chain with these conditional acceptance rates, position by position."""
    return 1 + sum(accumulate(rates, mul))


def measured_lengths(num_draft_tokens: int) -> list[int]:
    """The chains whose step times are measured; those between are interpolated.
    Short ones lie close, because the time of a pass bends between one token and four."""
    longest = num_draft_tokens
    return sorted({longest, *(k for k in range(1, longest) if k <= 4 or k % (2 if k <= 8 else 4) == 0)})


def predict(
    drafter: str,
    temperature: float,
    times: Mapping[Cell, StepTime],
    chains: Sequence[float],
    others: Mapping[Shape, float],
) -> CostModel:
    """Predict the chains and the other drafts at every batch size measured.
    times: of every shape of ``others``, of chains (at least the longest) and of decoding without a draft. chains: the
    acceptance length of K = 1, 2, ... others: trees, with the acceptance length of each."""
    steps = {batch_size: time.verify for (batch_size, shape), time in times.items() if shape is None}
    predictions = []

    def add(batch_size: int, shape: Shape, acceptance_length: float, time: StepTime) -> None:
        if acceptance_length != acceptance_length:  # answers too short to tell
            return
        kind = "chain" if isinstance(shape, StaticTree) and shape.is_chain else "tree"
        gain = predicted_speedup(acceptance_length, time.draft, time.verify, steps[batch_size])
        row = (batch_size, str(shape), kind, shape.num_nodes, acceptance_length, time.draft, time.verify, gain)
        predictions.append(Prediction(*row))

    for batch_size in steps:
        measured = {
            shape.depth: time
            for (of, shape), time in times.items()
            if of == batch_size and isinstance(shape, StaticTree) and shape.is_chain
        }
        lengths = sorted(measured)
        for k, acceptance_length in enumerate(chains if measured else (), start=1):
            draft = np.interp(k, lengths, [measured[length].draft for length in lengths])
            verify = np.interp(k, lengths, [measured[length].verify for length in lengths])
            add(batch_size, StaticTree.chain(k), acceptance_length, StepTime(float(draft), float(verify)))
        for shape, acceptance_length in others.items():
            if (batch_size, shape) in times:
                add(batch_size, shape, acceptance_length, times[batch_size, shape])
    return CostModel(drafter, temperature, steps, predictions)
