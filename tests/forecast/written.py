"""Runs as ``train.py`` leaves them, with learning curves of one's own."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

STEPS, EVERY, TOKENS = 400, 20, 500  # optimizer steps, between two measurements, tokens of each


def write_run(
    folder: Path, curve: Callable[[float], float], cost: tuple[float, float] = (0.05, 1.1), **settings: Any
) -> Path:
    """A run whose live acceptance length behind so many tokens is ``curve``; settings by names with ``__`` for dots.
    cost: of a drafted token and of a verification, in target steps."""
    optimizer = {"_target_": "specdraft.training.schedule.OptimizerSettings", "schedule": "constant"}
    config: dict[str, Any] = {
        "model": {"optimizer": {**optimizer, "warmup_steps": 0.05}, "drafter": {"num_layers": 1}},
        "data": {"limit": 1000, "batch_size": 1, "sequence_length": 512},
        "trainer": {"max_steps": STEPS},
        "decoding": {"num_draft_tokens": 5},
        "seed": 0,
    }
    for name, value in settings.items():
        place = config
        *parts, last = name.split("__")
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    names = ["step", "acceptance_length", "acceptance_length_error", "cost_ratio", "verification_cost_ratio"]
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, [*names, "train/tokens_per_step"])
        rows.writeheader()
        for step in range(EVERY, config["trainer"]["max_steps"] + 1, EVERY):
            rows.writerow({"step": step, "train/tokens_per_step": TOKENS})
            values = (step, curve(step * TOKENS), 0.05, *cost)
            rows.writerow(dict(zip(names, values, strict=True)))
    return folder
