"""Regeneration as the tests call it, in this process and in others."""

import multiprocessing
import threading
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdraft.data.regeneration.cache import regenerate
from specdraft.data.regeneration.request import RegenerationSettings
from specdraft.targets import Target

SETTINGS = RegenerationSettings(temperatures=(0.0, 1.0), max_new_tokens=8, seed=5)


TEMPLATES = Path(__file__).parents[1] / "templates"


FORK = multiprocessing.get_context("fork")


def run(
    target: Target,
    conversations: Any,
    folder: Path,
    engine: Any,
    settings: Any = SETTINGS,
    room: int = 256,
    max_refused: int = 0,
    share: str | None = None,
) -> Any:
    said = "train conversations"
    return regenerate(target, conversations, settings, folder, room, said, engine, max_refused, share)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def start(*args: Any) -> Any:
    tqdm.set_lock(threading.RLock())  # tqdm's own is shared with forks, and a killed one would never let go of it
    process = FORK.Process(target=run, args=args)
    process.start()
    return process
