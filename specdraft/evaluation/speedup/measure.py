"""Measure what the cost model needs for a drafter that has just been evaluated, and predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdraft.decoding.shapes import Shape, StaticTree, tree_from_accuracies
from specdraft.evaluation.results import Request, Result
from specdraft.evaluation.speedup.model import (
    CostModel,
    CostSettings,
    chain_acceptance_length,
    measured_lengths,
    predict,
)
from specdraft.evaluation.speedup.rank_accuracy import Answer, draft_ranks, rank_accuracies, replayed_acceptance_length
from specdraft.evaluation.speedup.step_times import StepTimer

if TYPE_CHECKING:
    from specdraft.decoding.rules import Rule
    from specdraft.decoding.sampling import Sampling
    from specdraft.drafters.base import Drafter
    from specdraft.targets import Target


_TOP = 4  # ranks of a level that a tree may draft
_DRAFTED_AGAIN = 8192  # tokens of the greedy answers on which ranks are measured: all of an ordinary benchmark


@dataclass(frozen=True)
class Costs:
    """Acceptance lengths of all drafts that are considered, and the timer of their rounds.
    chains: of K = 1, 2, ... others: of trees. ``model`` predicts once the timer has measured."""

    drafter: str
    temperature: float
    chains: list[float]
    others: dict[Shape, float]
    sampled: bool
    timer: StepTimer

    @property
    def shapes(self) -> list[Shape]:
        """All of them."""
        return [*(StaticTree.chain(k, self.sampled) for k in range(1, len(self.chains) + 1)), *self.others]

    def model(self, typical: bool = False) -> CostModel:
        """The predictions, from what has been measured so far: means, or what is ``typical``."""
        times = self.timer.typical() if typical else self.timer.times()
        return predict(self.drafter, self.temperature, times, self.chains, self.others)


def costs(
    target: "Target",
    drafter: "Drafter",
    result: Result,
    requests: Sequence[Request],
    shape: Shape,
    sampling: "Sampling",
    rule: "Rule",
    cost: CostSettings,
    decoded: Mapping[Shape, float] | None = None,
) -> Costs | None:
    """What to predict from at the temperature of ``result``, decoded in this ``shape``; None if nothing was accepted.
    Chains are predicted up to the depth of ``shape``: at temperature 0 by replaying answers, which also gives the trees
    of ``cost.tree_sizes``; above it, and under a grammar, from the rates of ``result``, if it drafted chains.
    ``decoded``: other drafts whose acceptance lengths are known."""
    text = typical_text(requests)
    if not result.counts.accepted or len(text) >= target.max_length:
        return None
    own_chain = isinstance(shape, StaticTree) and shape.is_chain
    rates = [rate for rate in result.counts.conditional_acceptance_rate if rate == rate]
    chains = [chain_acceptance_length(rates[:k]) for k in range(1, len(rates) + 1)] if own_chain else []
    others: dict[Shape, float] = {} if own_chain else {shape: result.counts.acceptance_length}
    others.update(decoded or {})
    if sampling.greedy and sampling.grammar is None:  # replaying drafts without a mask
        ranks = draft_ranks(drafter, target, _answers(requests), shape.depth, _TOP)
        right = rank_accuracies(ranks, shape.depth, _TOP)
        trees = [tree_from_accuracies(right, size) for size in cost.tree_sizes]
        lengths = range(1, len(right) + 1)
        replayed = [replayed_acceptance_length(ranks, StaticTree.chain(k)) for k in lengths]
        # The sample of answers may be easier or harder than all of them.
        scale = chains[-1] / replayed[-1] if len(chains) == len(replayed) else 1.0
        chains = [scale * each for each in replayed]
        others.update((tree, scale * replayed_acceptance_length(ranks, tree)) for tree in trees if not tree.is_chain)
    sampled = shape.sampled if isinstance(shape, StaticTree) else True
    timed: list[Shape] = [StaticTree.chain(k, sampled) for k in measured_lengths(len(chains))] if chains else []
    timer = StepTimer(target, drafter, text, [*timed, *others], cost.batch_sizes, sampling, rule)
    return Costs(result.drafter, result.temperature, chains, others, sampled, timer)


def typical_text(requests: Sequence[Request]) -> list[int]:
    """A prompt with the first half of its answer, of the request that was answered at greatest length."""
    longest = max(requests, key=lambda request: len(request.baseline.tokens))
    answer = longest.baseline.tokens
    return [*longest.prompt_ids, *answer[: len(answer) // 2]]


def accuracies(
    drafter: "Drafter", target: "Target", requests: Sequence[Request], depth: int, top: int
) -> list[list[float]]:
    """How often each rank of each level is right on the answers of ``requests``, as ``rank_accuracies`` says."""
    return rank_accuracies(draft_ranks(drafter, target, _answers(requests), depth, top), depth, top)


def _answers(requests: Sequence[Request]) -> list[Answer]:
    """Whole answers, from requests that lie evenly among all, until they hold enough tokens."""
    whole = [request for request in requests if len(request.baseline.tokens) > 1]
    every = max(1, round(sum(len(request.baseline.tokens) for request in whole) / _DRAFTED_AGAIN))
    return [(request.prompt_ids, request.baseline.tokens) for request in whole[::every]]
