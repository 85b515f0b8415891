"""What a run tells of its learning curve: live acceptance over tokens, its costs, its settings.

N = live measurements behind the warm-up."""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from specdraft.decoding.shapes import draft_tokens
from specdraft.drafters.checkpoint import read_config
from specdraft.entry import build
from specdraft.errors import UserError
from specdraft.files import read_json
from specdraft.forecast.curves import Array
from specdraft.training.schedule import OptimizerSettings

FEWEST = 6  # measurements; a curve has three unknowns
_SETTINGS = Path(".hydra") / "config.yaml"  # as Hydra leaves it in every run directory


@dataclass(frozen=True, eq=False)
class Run:
    """A training run as its directory describes it."""

    name: str
    steps: Array  # [N]
    tokens: Array  # [N], read by the drafter by then
    lengths: Array  # [N], live acceptance lengths
    decay: Array  # [N], the share of the peak by which the learning rate has come down
    errors: Array  # [N], standard errors of the lengths over prompts like these; NaN where they were not logged
    num_draft_tokens: int
    round_cost: float  # of a round with its draft, in target steps; NaN where nothing was timed
    data_tokens: float  # of one reading of the data; NaN where it is not recorded
    settings: Mapping[str, Any]  # by dotted names
    optimizer: OptimizerSettings
    max_steps: int

    @property
    def last_decay(self) -> float:
        """Of a training that is carried through."""
        return 1.0 - self.optimizer.ratio(self.max_steps, self.max_steps)

    def first(self, share: float) -> "Run":
        """The run as it stood when ``share`` of its steps were done: no measurement behind them is looked at."""
        seen = self.steps <= share * self.max_steps
        parts = {name: getattr(self, name)[seen] for name in ("steps", "tokens", "lengths", "decay", "errors")}
        return Run(**{**self.__dict__, **parts})


def read_run(directory: str | Path) -> Run:
    """A run of ``train.py`` with ``logger=csv``. Raises UserError for anything else, and for too few measurements."""
    directory = Path(directory)
    if not (directory / "metrics.csv").is_file() or not (directory / _SETTINGS).is_file():
        wanted = "the directory of a training run with its metrics.csv and .hydra/config.yaml"
        raise UserError(f"{directory} is no run that a forecast can read: expected {wanted}")
    config = OmegaConf.load(directory / _SETTINGS)
    optimizer, max_steps = build(config.model.optimizer), int(config.trainer.max_steps)
    with (directory / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    step, length = _column(rows, "step", "acceptance_length")
    behind = step >= _warm_up(optimizer, max_steps)
    step, length = step[behind], length[behind]
    if len(step) < FEWEST:
        mend = f"set live.every_n_steps={max(1, max_steps // 20)} or less and train again"
        found = f"{directory} has {len(step)} live measurements behind the warm-up"
        raise UserError(f"{found}: expected at least {FEWEST}; {mend}")
    _, read = _column(rows, "step", "train/tokens_per_step")
    per_step = float(read.mean()) if len(read) else float(config.data.batch_size * config.data.sequence_length)
    draft, verify = (_column(rows, "step", name)[1] for name in ("cost_ratio", "verification_cost_ratio"))
    depth = draft_tokens(config.decoding.num_draft_tokens)
    error = dict(zip(*_column(rows, "step", "acceptance_length_error"), strict=True))
    settings = _flat(OmegaConf.to_container(config, resolve=False))
    return Run(
        name=directory.name,
        steps=step,
        tokens=step * per_step,
        lengths=length,
        decay=np.array([1.0 - optimizer.ratio(int(each) - 1, max_steps) for each in step]),
        errors=np.array([error.get(each, math.nan) for each in step]),
        num_draft_tokens=depth,
        round_cost=_measured_cost(directory, float(np.median(verify + depth * draft)) if len(draft) else math.nan),
        data_tokens=_data_tokens(directory),
        settings=settings,
        optimizer=optimizer,
        max_steps=max_steps,
    )


def _column(rows: list[dict[str, str]], first: str, second: str) -> tuple[Array, Array]:
    found = [(float(row[first]), float(row[second])) for row in rows if row.get(second)]
    table = np.array(found).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _warm_up(optimizer: OptimizerSettings, max_steps: int) -> float:
    given = optimizer.warmup_steps
    return given * max_steps if given < 1 else given


def _measured_cost(directory: Path, live: float) -> float:
    """Of a round, by the run's own evaluation where there is one: it times more than a live measurement can."""
    if not (directory / "evaluation.json").is_file():
        return live
    result = read_json(directory / "evaluation.json")["results"][0]
    if not result.get("speedup"):
        return live
    return float(result["acceptance_length"] / result["speedup"])


def _data_tokens(directory: Path) -> float:
    try:
        return float(read_config(directory)["extra"]["data"]["train_tokens"])
    except (UserError, KeyError, TypeError):
        return math.nan


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {
            key: each for part in value for key, each in _flat(value[part], f"{name}.{part}" if name else part).items()
        }
    return {name: json.dumps(value)}
