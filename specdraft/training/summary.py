"""The end of a training on a terminal: what it came to, in at most 80 columns, and what its files hold."""

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.loggers import Logger

from specdraft.drafters.base import Drafter
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.module import DrafterModule
from specdraft.training.monitoring.loggers import where

WIDTH = 80
_LABEL = 20


def summary(module: DrafterModule, live: LiveAcceptance | None, seconds: float) -> str:
    """The table. ``seconds`` is the wall time of the whole training, measurements included."""
    first, last = module.first_values, module.last_values
    rows = [("training", f"{module.trainer.global_step:,} steps in {_duration(seconds)}")]
    if module.seconds:
        rows.append(("speed", f"{module.tokens / module.seconds:,.0f} tokens/s, {_duration(module.seconds)} training"))
    for split in ("train", "validation"):
        name = f"{split}/loss"
        if name in last:
            rows.append((f"{split} loss", _span(first[name], last[name], ".3f")))
    rows.append(("acceptance length", ""))
    for label, name in (
        ("  teacher-forced", "validation/teacher_forced_acceptance_length"),
        ("  really decoded", "acceptance_length"),
    ):
        if name in last:
            rows.append((label, _span(first[name], last[name], ".2f")))
    if live is not None and live.best is not None:
        rows.append(("  best head", f"{live.best:.2f} after step {live.best_step:,}"))
    rates = [
        last.get(f"conditional_acceptance_rate_{place}") for place in range(1, live.num_draft_tokens + 1 if live else 1)
    ]
    shown = ["  -  " if rate is None else f"{rate:.3f}" for rate in rates]
    per_line = (WIDTH - _LABEL) // 6
    for start in range(0, len(shown), per_line):
        rows.append(("  by position" if not start else "", " ".join(shown[start : start + per_line])))
    if "predicted_speedup" in last:
        value = f"{last['predicted_speedup']:.2f}, a draft step costs {last['cost_ratio']:.2f} target steps"
        rows.append(("predicted speedup", value))
    return "\n".join(f"{label:{_LABEL}}{value}".rstrip() for label, value in rows)


def _span(first: float, last: float, form: str) -> str:
    return f"{first:{form}} -> {last:{form}}"


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
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    line = f"{_megabytes(_bytes(directory / 'drafter'))}: {parameters:,} parameters x 4 bytes, nothing of the target"
    last = directory / "checkpoints" / "last.ckpt"
    if not last.exists():
        return line
    return f"{line}; last.ckpt {_megabytes(_bytes(last))}: with the optimizer's states of {trained:,} trained ones"


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
