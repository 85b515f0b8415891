"""What a checkpoint holds, in bytes: the drafter, its optimizer's states, and nothing of the target."""

from pathlib import Path

from specdraft.drafters.base import Drafter


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
