"""The end of a training on a terminal: what it came to, in at most 80 columns, and what its files hold."""

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.loggers import Logger
from torch.nn import Parameter

from specdraft.drafters.base import Drafter
from specdraft.rendering import render
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.module import DrafterModule
from specdraft.training.monitoring.loggers import where


def summary(module: DrafterModule, live: LiveAcceptance | None, seconds: float) -> str:
    """The table. ``seconds`` is the wall time of the whole training, measurements included."""
    places = range(1, live.num_draft_tokens + 1 if live else 1)
    rates = [module.last_values.get(f"conditional_acceptance_rate_{place}") for place in places]
    shown = ["  -  " if rate is None else f"{rate:.3f}" for rate in rates]
    values = {"module": module, "live": live, "rates": shown, "duration": _duration, "seconds": seconds}
    return render("training/summary.txt.jinja", **values).rstrip("\n")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def outputs(directory: Path, drafter: Drafter, loggers: Iterable[Logger]) -> str:
    """Where a run has left its head and its curves, and what the head weighs."""
    lines = [f"head:    {directory / 'drafter'}", f"size:    {explain_sizes(directory, drafter)}"]
    return "\n".join([*lines, *(f"curves:  {where(logger)}" for logger in loggers)])


def explain_sizes(directory: Path, drafter: Drafter) -> str:
    """One line about ``drafter/`` and ``checkpoints/last.ckpt``, if that is there, of a run directory."""
    parameters = sum(_count(parameter) for parameter in drafter.parameters())
    trained = sum(_count(parameter) for parameter in drafter.parameters() if parameter.requires_grad)
    line = f"{_megabytes(directory / 'drafter')}: {parameters:,} parameters x 4 bytes, nothing of the target"
    last = directory / "checkpoints" / "last.ckpt"
    if not last.exists():
        return line
    return f"{line}; last.ckpt {_megabytes(last)}: with the optimizer's states of {trained:,} trained ones"


def _count(parameter: Parameter) -> int:
    """Its numbers, also where ZeRO-3 has cut it over the ranks and left none of them here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _megabytes(path: Path) -> str:
    files = path.rglob("*") if path.is_dir() else [path]
    return f"{sum(file.stat().st_size for file in files if file.is_file()) / 1e6:,.2f} MB"
