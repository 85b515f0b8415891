"""The planner's memory beside that of the same run: ``python benchmarks/plan_memory.py [--device cuda] [--record]``.

Each family trains two real steps on a random target whose sizes make the run large beside what libraries hold. On a
CPU the memory is the peak of the resident set over what the process held before; on CUDA what torch has allocated.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import ctypes
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning import Callback, LightningDataModule, Trainer
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from common import print_table, write_result
from specdraft.entry import build
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.training.module import DrafterModule
from specdraft.training.planning.plan import make_plan
from step_worker import status

CONF = Path(__file__).parents[1] / "conf"
STEPS = 2  # AdamW makes its moments in the first
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "heads": 12},
    "cuda": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "heads": 32},
}  # fmt: skip
ROWS = {"cpu": (2, 64), "cuda": (4, 2048)}
FAMILIES = {
    "eagle3": ["model.draft_vocab_size=8192", "model.drafter.ttt_steps=3"],
    "medusa": ["model.drafter.num_heads=3"],
    "draft": ["model.drafter.start=layers", "model.drafter.checkpoint=null", "model.drafter.copy_layers=3"],
}


class Batches(LightningDataModule):
    """The same packed batch again and again: one document a row, every answer token supervised."""

    def __init__(self, vocab_size: int, rows: int, length: int, steps: int = STEPS) -> None:
        super().__init__()
        self.steps = steps
        ids = torch.randint(vocab_size, (rows, length))
        positions = torch.arange(length).expand(rows, length).contiguous()
        self.batch = Batch(ids, positions, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))

    def train_dataloader(self) -> DataLoader[Any]:
        """As many batches as there are steps."""
        batches: Any = [self.batch] * self.steps
        return DataLoader(batches, batch_size=None)


def measure(family: str, device: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Plan and train one family on a target of this shape. Sizes in bytes."""
    architecture = architecture_of(shape)
    rows, length = ROWS[device]
    config = composed(family, device, rows, length)
    plan = make_plan(config, architecture, "random")
    _forget()
    before = status("VmRSS") * 2**20
    train(config, architecture, device, Batches(architecture.vocab_size, rows, length))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM") * 2**20 - before
    _forget()
    return {"family": family, "planned": plan.memory_per_device, "measured": peak, "parts": plan.memory}


def composed(family: str, device: str, rows: int, length: int) -> DictConfig:
    """The configuration of a run of one process."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    precision = "32-true" if device == "cpu" else "bf16-mixed"
    accelerator = "cpu" if device == "cpu" else "gpu"
    settings = (
        f"model={family}",
        "target=llama-8b",
        f"data.batch_size={rows}",
        f"data.sequence_length={length}",
        f"target.dtype={dtype}",
    )
    trainer = (f"trainer.accelerator={accelerator}", "trainer.devices=1", f"trainer.precision={precision}")
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("train", [*settings, *trainer, "strategy=single", *FAMILIES[family]])


def train(
    config: DictConfig, architecture: PreTrainedConfig, device: str, data: Batches, callbacks: Sequence[Callback] = ()
) -> None:
    """Train all batches on a random target."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        target = Target.from_model(AutoModelForCausalLM.from_config(architecture, dtype=dtype))
        vocabulary = config.model.draft_vocab_size
        ids = None if vocabulary is None else torch.arange(vocabulary)
        drafter = build(config.model.drafter, _partial_=True)(target=target, draft_vocabulary=ids)
    module = DrafterModule(drafter, target, build(config.model.optimizer))
    trainer: Trainer = build(
        config.trainer,
        max_steps=data.steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        val_check_interval=None,
        check_val_every_n_epoch=1,
    )
    trainer.fit(module, data)


def architecture_of(shape: dict[str, Any]) -> PreTrainedConfig:
    """A Llama of these sizes."""
    heads = shape["heads"]
    sizes = {key: value for key, value in shape.items() if key != "heads"}
    return AutoConfig.for_model(
        "llama", **sizes, num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=4096
    )


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark


def main() -> None:
    """Measure, print, and record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cpu")
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--record", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    small = SHAPES["cpu"] | {"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 64, "heads": 4}
    measure(options.families[0], options.device, small)  # libraries load what they load
    found = []
    for family in options.families:
        found.append(measure(family, options.device, SHAPES[options.device]))
        if options.json:
            print(json.dumps(found[-1]), flush=True)
    if options.json:
        return
    header = ("family", "planned MB", "measured MB", "planned / measured")
    print_table(
        header,
        [
            (
                str(line["family"]),
                f"{line['planned'] / 1e6:,.0f}",
                f"{line['measured'] / 1e6:,.0f}",
                f"{line['planned'] / line['measured']:.3f}",
            )
            for line in found
        ],
    )
    if options.record:
        settings = {"device": options.device, "shape": SHAPES[options.device], "rows": ROWS[options.device]}
        print(write_result("plan_memory", settings, {"families": found}))


if __name__ == "__main__":
    main()
