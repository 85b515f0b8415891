"""What only W&B can show: decoded answers with every token colored by its status, and acceptance as a table."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.trace import Trace, segments
from specdraft.evaluation.report.token_view import page


@rank_zero_only
def log_samples(
    loggers: Iterable[Logger],
    step: int,
    counts: AcceptanceCounts,
    samples: Sequence[tuple[str, Trace, int]],
    tokenizer: Any,
) -> None:
    """Send the tables ``samples`` and ``conditional_acceptance`` of a live measurement to W&B, if that is a logger.

    ``samples`` holds categories, traces and how many tokens the answers have; without a tokenizer tokens are shown as
    numbers.
    """
    for logger in loggers:
        if not isinstance(logger, WandbLogger):
            continue
        import wandb

        rows = [[step, *_sample_row(*sample, tokenizer)] for sample in samples]
        for row in rows:
            row[3] = wandb.Html(row[3], inject=False, data_is_not_path=True)
        columns = ["step", "category", "prompt", "answer", "acceptance_length"]
        logger.log_table("samples", columns, rows, step=step)
        columns = ["step", "position", "reached", "accepted", "conditional_acceptance_rate", "survival"]
        logger.log_table("conditional_acceptance", columns, _position_rows(step, counts), step=step)


def _sample_row(category: str, trace: Trace, length: int, tokenizer: Any) -> list[Any]:
    rounds = trace.rounds
    counts = AcceptanceCounts(0, rounds=len(rounds), accepted=sum(each.accepted for each in rounds))
    accepted = counts.acceptance_length if rounds else None
    return [category, _text(trace.prompt, tokenizer), answer_html(trace, length, tokenizer), accepted]


def _position_rows(step: int, counts: AcceptanceCounts) -> list[list[Any]]:
    places = zip(
        counts.reached_per_position,
        counts.accepted_per_position,
        counts.conditional_acceptance_rate,
        counts.survival,
        strict=True,
    )
    # A position that no round reached has no rate.
    return [
        [step, position, reached, accepted, rate if reached else None, survival if counts.rounds else None]
        for position, (reached, accepted, rate, survival) in enumerate(places, start=1)
    ]


def answer_html(trace: Trace, length: int, tokenizer: Any) -> str:
    """The first ``length`` tokens of the answer as a page that shows the status of each."""
    return page(segments(trace, length, tokenizer))


def _text(tokens: Sequence[int], tokenizer: Any) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else str(tokenizer.decode(tokens))
