"""What only W&B can show: decoded answers with every token colored by its status, and acceptance as a table."""

import math
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from specdraft.decoding.metrics import AcceptanceCounts, acceptance_length
from specdraft.decoding.trace import Trace, segments
from specdraft.evaluation.report.pages import answer_page
from specdraft.training.callbacks import find_callback
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.module import DrafterModule


class SampleTables(Callback):
    """Sends the tables ``samples`` and ``conditional_acceptance`` of each live measurement to W&B, if that is a logger.
    Without a tokenizer tokens are shown as numbers."""

    def __init__(self) -> None:
        self._shown: int | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Show the measurement that has just been made."""
        live = find_callback(trainer, LiveAcceptance)
        step = trainer.global_step
        if live is None or live.measured_step != step or self._shown == step or not trainer.is_global_zero:
            return
        self._shown = step
        tokenizer = cast(DrafterModule, pl_module).target.tokenizer
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                rows = [[step, *sample_row(*sample, tokenizer)] for sample in live.samples]
                for row in rows:
                    row[3] = wandb.Html(row[3], inject=False, data_is_not_path=True)
                columns = ["step", "category", "prompt", "answer", "acceptance_length"]
                logger.log_table("samples", columns, rows, step=step)
                columns = ["step", "position", "reached", "accepted", "conditional_acceptance_rate", "survival"]
                logger.log_table("conditional_acceptance", columns, _position_rows(step, live.counts), step=step)


def sample_row(category: str, trace: Trace, length: int, tokenizer: Any) -> list[Any]:
    """Category, prompt, the first ``length`` tokens of the answer as a page, and its acceptance length."""
    prompt = " ".join(map(str, trace.prompt)) if tokenizer is None else str(tokenizer.decode(trace.prompt))
    accepted = acceptance_length(sum(each.accepted for each in trace.rounds), len(trace.rounds))
    return [category, prompt, answer_page(segments(trace, length, tokenizer)), accepted if trace.rounds else None]


def _position_rows(step: int, counts: AcceptanceCounts) -> list[list[Any]]:
    sums = (counts.reached_per_position, counts.accepted_per_position)
    places = zip(*sums, counts.conditional_acceptance_rate, counts.survival, strict=True)
    # A position that no round reached has no rate.
    return [[step, place, *(None if math.isnan(each) else each for each in row)] for place, row in enumerate(places, 1)]
