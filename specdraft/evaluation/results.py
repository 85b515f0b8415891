"""From timed generations to the numbers that are reported: pure functions, no model in sight.

P = prompts, R = resamples. Definitions of acceptance are those of ``specdraft.decoding.metrics``. Here also:

- *tokens per second* = emitted tokens / (prefill + decoding time), counted alike with and without drafting: ids, cut at
  the end of text and at the requested length.
- *speedup* = tokens per second with drafting / without, same loop, prompts and sampling. *decoding speedup*: the same
  without the prompts' passes, which is what the cost model (``specdraft.evaluation.speedup.model``) predicts.
- *cost ratio* c = draft step time / target step time. The draft step is everything the drafter costs in a round over K;
  the target step is a round of the baseline, a forward pass over one token.
- *modeled speedup* = tau / (1 + K * c): what the measured acceptance and cost would give if verifying K + 1 tokens
  cost the target no more than decoding one. *verification cost ratio* says how far that is from true.
- *distinct n-grams*: how little a text repeats itself. A target that loops makes drafting easy and its acceptance
  length worthless."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdraft.decoding.metrics import AcceptanceCounts, cost_ratio, predicted_speedup
from specdraft.evaluation.bootstrap import Interval, bootstrap_interval
from specdraft.evaluation.losslessness import Difference
from specdraft.export.engine import GREEDY

if TYPE_CHECKING:
    from specdraft.decoding.generation import Generation


@dataclass(frozen=True)
class Request:
    """One answer, decoded with and without drafting from the same token ids. ``prompt`` numbers the conversation.
    difference: of greedy answers, where the drafted one departs from the baseline."""

    prompt: int
    category: str
    baseline: "Generation"
    drafted: "Generation"
    prompt_ids: list[int] = field(default_factory=list)
    difference: Difference | None = None


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % bootstrap interval over prompts (None below two prompts)."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Result:
    """What one drafter did at one temperature, over all prompts or over one category.
    drafting: "greedy" or "sampled". beside: drafted in another way than the evaluation is about, for comparison."""

    drafter: str
    temperature: float
    drafting: str
    beside: bool
    category: str | None
    prompts: int
    requests: int
    counts: AcceptanceCounts
    conditional_acceptance_interval: list[Interval | None]  # by position
    acceptance_length: Estimate
    acceptance_length_per_request: Estimate
    tokens: int
    tokens_per_second: float
    baseline_tokens: int
    baseline_tokens_per_second: float
    speedup: Estimate
    decoding_speedup: float
    draft_step_seconds: float
    target_step_seconds: float
    cost_ratio: float
    verification_cost_ratio: float
    modeled_speedup: float
    differences: list[Difference] | None  # of greedy answers from the baseline's; None when sampling
    nodes_per_round: float
    divergence: float | None  # of a lossy rule: total variation of a round's first token from the target's distribution

    @property
    def label(self) -> str:
        """The drafter's name, with its drafting where that is not what the evaluation is about."""
        return f"{self.drafter}, {self.drafting}" if self.beside else self.drafter

    @property
    def lossless(self) -> bool | None:
        """Whether drafting changed no greedy token but near-ties; None when sampling, which keeps a distribution."""
        return None if self.differences is None else all(each.near_tie for each in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-able; intervals are ``[low, high]`` beside their value."""
        flat: dict[str, Any] = {"label": self.label, "lossless": self.lossless}
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Estimate):
                flat |= {name: value.value, f"{name}_interval": value.interval and list(value.interval)}
            elif isinstance(value, AcceptanceCounts):
                flat = value.to_dict() | flat
            elif name == "differences":
                flat[name] = value if value is None else [asdict(each) for each in value]
            elif name != "category" or value is not None:
                flat[name] = value
        return flat


def summarize(
    requests: Sequence[Request],
    drafter: str,
    temperature: float,
    num_draft_tokens: int,
    category: str | None = None,
    seed: int = 0,
    drafting: str = GREEDY,
    beside: bool = False,
) -> Result:
    """Reduce the requests of one drafter at one temperature (and one category) to a result."""
    counts = AcceptanceCounts(num_draft_tokens)
    names = ["accepted", "rounds", "tau", "with_rounds", "tokens", "seconds", "baseline_tokens", "baseline_seconds"]
    names += [f"{what} {position}" for what in ("reached", "accepted") for position in range(num_draft_tokens)]
    sums = {prompt: dict.fromkeys(names, 0.0) for prompt in sorted({request.prompt for request in requests})}
    for request in requests:
        own = AcceptanceCounts(num_draft_tokens).add(request.drafted)
        counts = counts + own
        row = sums[request.prompt]
        row["accepted"] += own.accepted
        row["rounds"] += own.rounds
        if own.rounds:  # an answer that ended with its first token was never verified
            row["tau"] += own.acceptance_length
            row["with_rounds"] += 1
        row["tokens"] += len(request.drafted.tokens)
        row["seconds"] += request.drafted.prefill_seconds + request.drafted.decode_seconds
        row["baseline_tokens"] += len(request.baseline.tokens)
        row["baseline_seconds"] += request.baseline.prefill_seconds + request.baseline.decode_seconds
        for position in range(num_draft_tokens):
            row[f"reached {position}"] += own.reached_per_position[position]
            row[f"accepted {position}"] += own.accepted_per_position[position]
    columns = torch.tensor([[row[name] for name in names] for row in sums.values()], dtype=torch.float64)  # [P, C]

    def estimate(
        statistic: Callable[[dict[str, Tensor]], Tensor], bounds: Interval = (1.0, 1.0 + num_draft_tokens)
    ) -> Estimate:
        def of_sums(table: Tensor) -> Tensor:  # [R, C] -> [R]
            return statistic(dict(zip(names, table.unbind(-1), strict=True)))

        interval = bootstrap_interval(columns, of_sums, seed=seed, bounds=bounds)
        return Estimate(of_sums(columns.sum(0, keepdim=True)).item(), interval)

    total = dict(zip(names, columns.sum(0).tolist(), strict=True))
    draft_seconds = sum(request.drafted.draft_seconds for request in requests)
    target_step = _divide(
        sum(request.baseline.decode_seconds for request in requests),
        sum(len(request.baseline.tokens) - 1 for request in requests),  # a round emits one token
    )
    decode_seconds = sum(request.drafted.decode_seconds for request in requests)
    drafted_tokens = counts.rounds * num_draft_tokens
    ratio = cost_ratio(draft_seconds, drafted_tokens, target_step)
    differences = [request.difference for request in requests if request.difference is not None]
    divergences = [value for request in requests for value in request.drafted.divergence]
    return Result(
        drafter=drafter,
        temperature=temperature,
        drafting=drafting,
        beside=beside,
        category=category,
        prompts=len(sums),
        requests=len(requests),
        counts=counts,
        conditional_acceptance_interval=[
            estimate(partial(_share, f"accepted {i}", f"reached {i}"), (0.0, 1.0)).interval
            for i in range(num_draft_tokens)
        ],
        acceptance_length=estimate(lambda s: 1 + s["accepted"] / s["rounds"]),
        acceptance_length_per_request=estimate(lambda s: s["tau"] / s["with_rounds"]),
        tokens=int(total["tokens"]),
        tokens_per_second=_divide(total["tokens"], total["seconds"]),
        baseline_tokens=int(total["baseline_tokens"]),
        baseline_tokens_per_second=_divide(total["baseline_tokens"], total["baseline_seconds"]),
        speedup=estimate(
            lambda s: (s["tokens"] / s["seconds"]) / (s["baseline_tokens"] / s["baseline_seconds"]), (0.0, math.inf)
        ),
        # The first token of each answer comes from the prompt's pass.
        decoding_speedup=_divide(int(total["tokens"]) - len(requests), decode_seconds) * target_step,
        draft_step_seconds=_divide(draft_seconds, drafted_tokens),
        target_step_seconds=target_step,
        cost_ratio=ratio,
        verification_cost_ratio=_divide(_divide(decode_seconds - draft_seconds, counts.rounds), target_step),
        modeled_speedup=predicted_speedup(counts.acceptance_length, num_draft_tokens * ratio, 1.0, 1.0),
        differences=None if temperature else differences,
        nodes_per_round=_divide(sum(sum(request.drafted.nodes) for request in requests), counts.rounds),
        divergence=sum(divergences) / len(divergences) if divergences else None,
    )


def distinct_ngrams(token_lists: Iterable[Sequence[int]], n: int) -> float:
    """Share of the n-grams of each list that are distinct within it, pooled over the lists; NaN without n-grams.
    Repetition is looked for within a generation, not between them: two answers may well share their idioms."""
    distinct = total = 0
    for tokens in token_lists:
        ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
        distinct += len(set(ngrams))
        total += len(ngrams)
    return _divide(distinct, total)


def _share(part: str, whole: str, sums: dict[str, Tensor]) -> Tensor:
    return sums[part] / sums[whole]


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
