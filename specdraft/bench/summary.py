"""What is concluded from the blocks: latencies, speed, goodput, acceptance, energy, each with what it was divided by.

P = prompts (all their turns and rounds together), B = blocks.

The speedup is that of whole answers, tokens a second of the time that a request was under way. At a concurrency this is
the throughput's ratio (Little's law: requests under way = rate x time), without the ends of blocks where the engine
runs empty, and its unit is the prompt, so that there is an interval over prompts. What the wall clock says of a block
as a whole (tokens a second, energy, acceptance) has its interval over blocks."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdraft.bench.load import Load
from specdraft.bench.streaming import Answer
from specdraft.bench.turns import Block, percentile
from specdraft.errors import UserError
from specdraft.evaluation.bootstrap import Interval, bootstrap_interval

_PERCENTILES = (0.5, 0.95, 0.99)
Record = dict[str, Any]


@dataclass(frozen=True)
class Objective:
    """What a good answer is: first token and each further one within so many milliseconds; None: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        if any(value is not None and value <= 0 for value in (self.ttft_ms, self.tpot_ms)):
            given = f"objective.ttft_ms={self.ttft_ms} and objective.tpot_ms={self.tpot_ms}"
            raise UserError(f"{given}: expected milliseconds above 0, or null for none")

    def met(self, answer: Answer) -> bool:
        """Whether an answer arrived, and in time."""
        if answer.error:
            return False
        first, each = 1e3 * answer.first_token_seconds, 1e3 * (answer.token_seconds or 0.0)
        return first <= (self.ttft_ms or math.inf) and each <= (self.tpot_ms or math.inf)


def summarize(
    blocks: Sequence[Block], contender: str, load: Load, objective: Objective, price_per_hour: float | None = None
) -> Record:
    """A contender at a load, beside the first contender of the blocks, as bench.json holds it. Times in ms."""
    reference = blocks[0].contender if blocks else contender
    own = [block for block in blocks if (block.contender, block.load) == (contender, load)]
    plain = [block for block in blocks if (block.contender, block.load) == (reference, load)]
    answers = [answer for block in own for answer in block.answers]
    whole = [answer for answer in answers if answer.error is None]
    seconds, tokens = sum(block.seconds for block in own), sum(answer.tokens for answer in whole)
    speed = tokens / seconds if seconds else 0.0
    met = [objective.met(answer) for answer in answers]
    pairs = _pairs(own, plain)
    energy = energy_ratio(own, plain)
    joules = [block.joules for block in own]
    measured = None if None in joules or not tokens else sum(filter(None, joules)) / tokens
    return {
        "contender": contender,
        "load": {"kind": load.kind, "value": load.value},
        "requests": len(answers),
        "failed": len(answers) - len(whole),
        "failures": sorted({answer.error for answer in answers if answer.error}),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": speed,
        "requests_per_second": len(whole) / seconds if seconds else 0.0,
        **dict(zip(("speedup", "speedup_interval"), speedup(pairs), strict=True)),
        "ttft_ms": _times(1e3 * answer.first_token_seconds for answer in whole),
        "tpot_ms": _times(1e3 * each for answer in whole if (each := answer.token_seconds) is not None),
        "gap_ms": _times(1e3 * gap for answer in whole for gap in answer.gaps),
        "answer_ms": _times(1e3 * answer.seconds for answer in whole),
        "goodput": sum(met) / seconds if seconds else 0.0,
        **dict(zip(("met", "met_interval"), _share(answers, met), strict=True)),
        **acceptance(own),
        "compared": len(pairs),
        "different": sum(answer.said != expected.said for answer, expected in pairs),
        "joules_per_token": measured,
        "joules_ratio": energy[0],
        "joules_ratio_interval": energy[1],
        "dollars_per_million_tokens": price_per_hour / 3600 / speed * 1e6 if price_per_hour and speed else None,
    }


def speedup(pairs: Sequence[tuple[Answer, Answer]]) -> tuple[float | None, Interval | None]:
    """Tokens a second of request time against the reference's, and its interval over prompts; of pairs of answers."""
    sums: dict[int, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
    for answer, expected in pairs:
        row = [answer.tokens, answer.seconds, expected.tokens, expected.seconds]
        sums[answer.question.number] += torch.tensor(row, dtype=torch.float64)
    return _ratio(list(sums.values()), lambda total: (total[:, 0] / total[:, 1]) / (total[:, 2] / total[:, 3]))


def by_category(blocks: Sequence[Block], contender: str, load: Load) -> dict[str, tuple[float | None, Interval | None]]:
    """The speedup of each category's prompts."""
    own, plain = (
        [block for block in blocks if (block.contender, block.load) == (name, load)]
        for name in (contender, blocks[0].contender)
    )
    found: dict[str, list[tuple[Answer, Answer]]] = defaultdict(list)
    for pair in _pairs(own, plain):
        found[pair[0].question.category].append(pair)
    return {category: speedup(pairs) for category, pairs in found.items()}


def acceptance(blocks: Sequence[Block]) -> Mapping[str, Any]:
    """The engine's own counts; None where it counts nothing, as without drafts."""
    counted = [block.counters for block in blocks if block.counters is not None]
    rows = [torch.tensor([each.rounds, each.accepted], dtype=torch.float64) for each in counted if each.rounds]
    length, interval = _ratio(rows, lambda total: 1 + total[:, 1] / total[:, 0])
    rounds = sum(each.rounds for each in counted)
    positions = max((len(each.per_position) for each in counted), default=0)
    accepted = [sum(each.per_position[i] for each in counted if i < len(each.per_position)) for i in range(positions)]
    return {
        "rounds": rounds,
        "drafted": sum(each.drafted for each in counted),
        "accepted": sum(each.accepted for each in counted),
        "accepted_per_position": accepted if rounds else [],
        "acceptance_length": length,
        "acceptance_length_interval": interval,
    }


def energy_ratio(blocks: Sequence[Block], plain: Sequence[Block]) -> tuple[float | None, Interval | None]:
    """Joules a token against the reference's, and its interval over blocks; None where energy was not measured."""
    rows = []
    for block, beside in zip(blocks, plain, strict=True):
        if block.joules is None or beside.joules is None:
            return None, None
        tokens = [sum(answer.tokens for answer in each.answers if not answer.error) for each in (block, beside)]
        rows.append(torch.tensor([block.joules, tokens[0], beside.joules, tokens[1]], dtype=torch.float64))
    return _ratio(rows, lambda total: (total[:, 0] / total[:, 1]) / (total[:, 2] / total[:, 3]))


def _pairs(own: Sequence[Block], plain: Sequence[Block]) -> list[tuple[Answer, Answer]]:
    """Answers to the same question in the same round that are whole on both sides."""
    both = [
        pair for ours, theirs in zip(own, plain, strict=True) for pair in zip(ours.answers, theirs.answers, strict=True)
    ]
    return [(answer, expected) for answer, expected in both if not answer.error and not expected.error]


def _share(answers: Sequence[Answer], met: Sequence[bool]) -> tuple[float | None, Interval | None]:
    """Of requests that met the objective, and its interval over prompts."""
    sums: dict[int, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for answer, good in zip(answers, met, strict=True):
        sums[answer.question.number] += torch.tensor([float(good), 1.0], dtype=torch.float64)
    return _ratio(list(sums.values()), lambda total: total[:, 0] / total[:, 1], 1.0)


def _ratio(rows: Sequence[Tensor], statistic: Any, most: float = math.inf) -> tuple[float | None, Interval | None]:
    """A ratio of sums and its interval; None of nothing, and where a sum that it divides by is 0."""
    if not rows:
        return None, None
    columns = torch.stack(list(rows))
    value = float(statistic(columns.sum(0)[None]))
    return (value, bootstrap_interval(columns, statistic, bounds=(0.0, most))) if math.isfinite(value) else (None, None)


def _times(values: Iterable[float]) -> Record | None:
    found = list(values)
    if not found:
        return None
    named = {f"p{100 * share:.0f}": percentile(found, share) for share in _PERCENTILES}
    return {"mean": sum(found) / len(found), **named}
