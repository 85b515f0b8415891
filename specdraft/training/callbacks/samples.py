"""What only W&B can show: decoded answers with every token colored by its status, and acceptance as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.trace import Trace, segments
from specdraft.evaluation.report.pages import answer_page
from specdraft.training.callbacks import find_callback
from specdraft.training.callbacks.live_acceptance import LiveAcceptance

if TYPE_CHECKING:
    from specdraft.training.module import DrafterModule


class SampleTables(Callback):
    """Sends the tables ``samples`` and ``conditional_acceptance`` of each live measurement to W&B, if that is a logger.

    Without a tokenizer tokens are shown as numbers.
    """

    def __init__(self) -> None:
        self._shown: int | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Show the measurement that has just been made."""
        live = find_callback(trainer, LiveAcceptance)
        step = trainer.global_step
        if live is None or live.measured_step != step or self._shown == step or not trainer.is_global_zero:
            return
        self._shown = step
        tokenizer = cast("DrafterModule", pl_module).target.tokenizer
        for logger in trainer.loggers:
            if not isinstance(logger, WandbLogger):
                continue
            import wandb

            rows = [[step, *_sample_row(*sample, tokenizer)] for sample in live.samples]
            for row in rows:
                row[3] = wandb.Html(row[3], inject=False, data_is_not_path=True)
            columns = ["step", "category", "prompt", "answer", "acceptance_length"]
            logger.log_table("samples", columns, rows, step=step)
            columns = ["step", "position", "reached", "accepted", "conditional_acceptance_rate", "survival"]
            logger.log_table("conditional_acceptance", columns, _position_rows(step, live.counts), step=step)


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
    return answer_page(segments(trace, length, tokenizer))


def _text(tokens: Sequence[int], tokenizer: Any) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else str(tokenizer.decode(tokens))
