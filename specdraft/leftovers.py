"""A command that is refused, or ends before it has written anything, leaves nothing that it made.

Hydra makes the directory of a run, or those of a sweep and its jobs, before a command can check anything. What was
there just before that is never touched; what came since goes again if nothing of it is of worth."""

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

LOCK = ".lock"
"""Of a run's directory, with its ``owner`` (``training/run_lock.py``)."""
_SWEEP = "multirun.yaml"


def owner() -> str:
    """This process, as a lock names it."""
    return f"{os.getpid()} on {platform.node()}"


class Leftovers(Callback):
    """A callback of Hydra, and so asked before it makes any directory: of a run, or of a sweep."""

    asked: ClassVar[list["Leftovers"]] = []  # since the command began: itself, as Hydra has made it

    def __init__(self) -> None:
        """Nothing is looked at yet."""
        Leftovers.asked.append(self)
        self.directory: Path | None = None
        self.held: set[str] = set()  # names in it
        self.missing: list[Path] = []  # itself and its parents that are not there, the innermost first
        self.jobs: list[Path] = []  # a run is one as well
        self.worthless: tuple[str | None, ...] = ()  # what Hydra writes by itself

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """A run is to have a directory."""
        self._look(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """A sweep is to have one, with one in it for each of its jobs."""
        self._look(config, "hydra.sweep.dir")

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """A job has its own by now; whether that is new follows from what was there before all."""
        self.jobs.append(Path(config.hydra.runtime.output_dir))

    def _look(self, config: DictConfig, key: str) -> None:
        hydra_config: Any = HydraConfig.instance()
        earlier, hydra_config.cfg = hydra_config.cfg, config  # what ${hydra:...} in a name is resolved by
        with suppress(OSError, OmegaConfBaseException):  # Hydra comes upon that itself, and says it
            path = Path(OmegaConf.select(config, key)).absolute()
            self.held = {each.name for each in path.iterdir()} if path.exists() else set()
            self.missing = [each for each in (path, *path.parents) if not each.exists()]
            self.directory, self.worthless = path, (config.hydra.output_subdir, _SWEEP)
        hydra_config.cfg = earlier

    def clear(self) -> None:
        """Remove what came since, of each job and of all, if nothing of it is of worth."""
        if self.directory is None:
            return
        for job in self.jobs:
            inside = job.relative_to(self.directory).parts if job.is_relative_to(self.directory) else ()
            if inside and inside[0] not in self.held:
                self._empty(job, set(), [job, *job.parents][: len(inside)])
        self._empty(self.directory, self.held, self.missing)

    def _empty(self, directory: Path, held: set[str], made: Sequence[Path]) -> None:
        came = [each for each in directory.glob("*") if each.name not in held]
        with suppress(OSError):  # a directory that holds something, or a place where nothing can be removed
            if all(each.name in self.worthless or _own_lock(each) for each in came):
                for each in came:
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
            for each in made:
                each.rmdir()


def _own_lock(path: Path) -> bool:
    """Not that of another process that was faster in the same directory."""
    return path.name == LOCK and path.read_text(errors="replace").strip() == owner()


# Every command's, whatever its own configuration says of callbacks.
_TARGET = {"_target_": f"{__name__}.{Leftovers.__name__}"}
ConfigStore.instance().store("config", HydraConf(callbacks={"leftovers": _TARGET}), group="hydra", provider="specdraft")


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Around a command of Hydra's, which ends early by whatever it raises."""
    Leftovers.asked.clear()
    try:
        yield
    except BaseException:
        for each in Leftovers.asked:
            each.clear()
        raise
