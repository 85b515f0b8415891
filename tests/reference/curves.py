"""The first 20 optimizer steps of every family, run by the train command as a user would, and written down.

``make reference`` writes them; test_curves.py compares. A change of the code that changes a number shows here: where
the change is meant, the new curves belong to the same commit.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from hydra.core.global_hydra import GlobalHydra

from specdraft.commands import train

FOLDER = Path(__file__).parent
EAGLE3 = ["model.drafter.ttt_steps=3", "model.drafter.step_decay=0.8", "model.draft_vocab_size=512"]
FAMILIES = {
    "draft": ["model.drafter.copy_layers=2"],
    "pard": ["model.drafter.parallel=true", "model.drafter.copy_layers=2", "model.drafter.num_drafts=3"],
    "medusa": ["model.drafter.num_heads=3"],
    "mtp": ["model.drafter.ttt_steps=2"],
    "p_eagle": ["model.drafter.ttt_steps=3", "model.drafter.num_layers=2", "model.draft_vocab_size=512"],
    "dflash": ["model.drafter.num_layers=2", "model.drafter.block_size=4", "model.draft_vocab_size=512"],
    "dspark": ["model.drafter.num_layers=2", "model.drafter.block_size=4", "model.draft_vocab_size=512"],
    "domino": ["model.drafter.num_layers=2", "model.drafter.block_size=4", "model.draft_vocab_size=512"],
    "hydra": ["model.drafter.num_heads=3", "model.drafter.num_layers=1", "model.draft_vocab_size=512"],
    "redrafter": ["model.drafter.ttt_steps=3", "model.drafter.exit_size=320", "model.draft_vocab_size=512"],
    "eagle": ["model.drafter.ttt_steps=1", "model.drafter.feature_noise=0"],
    "eagle3": [*EAGLE3, "model.drafter.fc_norm=false", "model.drafter.norm_output=false"],
    "eagle3_1": EAGLE3,
}
MODELS = {"pard": "draft"}  # the others are named as their models are
# What a recipe or a default may say otherwise one day: the curves are about the code, not about them.
SETTINGS = [
    "model.optimizer.name=adamw",
    "model.optimizer.learning_rate=1e-3",
    "model.optimizer.warmup_steps=4",
    "model.optimizer.final_ratio=0.1",
    "seed=0",
    "target=tiny",
    "trainer=cpu",
    "trainer.max_steps=20",
    "trainer.accumulate_grad_batches=2",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=20",
    "data=messages",
    "data.regenerate=false",
    "data.sequence_length=64",
    "data.batch_size=1",
    "data.num_proc=1",
    "live.every_n_steps=0",
    "live.prompts=1",
    "live.max_new_tokens=2",
    "evaluate=false",
    "export=null",
    "logger=csv",
]
COLUMNS = ("train/loss", "train/grad_norm", "train/learning_rate", "validation/loss")


def write_conversations(path: Path) -> None:
    """Questions for small Python functions, whose answers differ in length."""
    operators = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
    with path.open("w", encoding="utf-8") as file:
        for number in range(40):
            for name, sign in operators.items():
                question = f"def {name}_{number}(values, start):\n    " + f'"""{name} all values and {number}."""\n'
                lines = [f"    total = start {sign} {number}"]
                lines += [f"    total = total {sign} values[{index}]" for index in range(number % 5)]
                messages = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": "\n".join([*lines, "    return total\n"])},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")


def curve(family: str, folder: Path) -> dict[str, list[float]]:
    """Train ``family`` in ``folder``; every column's values in the order of the steps."""
    write_conversations(folder / "conversations.jsonl")
    overrides = [f"model={MODELS.get(family, family)}", *SETTINGS, *FAMILIES[family]]
    overrides += [
        f"data.path={folder / 'conversations.jsonl'}",
        f"data.cache_dir={folder / 'cache'}",
        f"run_family={folder}",
        f"hydra.run.dir={folder / 'run'}",
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    GlobalHydra.instance().clear()
    try:
        with patch.object(sys, "argv", ["train.py", *overrides]):
            train.main()
    finally:
        torch.set_num_threads(threads)
    with (folder / "run" / "metrics.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return {name: [float(line[name]) for line in lines if line[name]] for name in COLUMNS}


def main() -> None:
    """Write every family's curve beside this file."""
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found = curve(family, Path(folder))
        path = FOLDER / f"{family}.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: loss {found['train/loss'][0]:.4f} -> {found['train/loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
