"""A run that is killed again and again, and resumed each time, ends with the weights of one that was left alone.

``python benchmarks/kill.py``: 200 steps of an EAGLE-3 head on a small random target, 20 times SIGKILL at random
moments: while it starts, trains or saves. Each process resumes what ``resume=auto`` finds. About two minutes on one
core.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning import Trainer, seed_everything
from transformers import LlamaConfig, LlamaForCausalLM

from common import print_table, write_result
from specdraft.data.datamodule import DataModule
from specdraft.data.packing import PackedTensor
from specdraft.drafters.eagle import Eagle3
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.training.callbacks.checkpoint import RunCheckpoint
from specdraft.training.callbacks.stop_signal import StopSignal
from specdraft.training.checkpoints.resume import find_resume
from specdraft.training.module import DrafterModule
from specdraft.training.monitoring.silence_warnings import silence_warnings
from specdraft.training.schedule import OptimizerSettings

VOCABULARY, LENGTH, ROWS = 64, 32, 64
_LLAMA = "transformers.models.llama.modeling_llama"


def make_target() -> Target:
    """Six random layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, head_dim=16, initializer_range=0.3, **sizes)
    return Target.from_model(LlamaForCausalLM(config).float(), name="random")


def make_data() -> DataModule:
    """Random rows under the sampler of every run: a kill strikes within an epoch."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    data = DataModule(source=SimpleNamespace(name="random"), batch_size=4)
    split: Any = SimpleNamespace(
        data=PackedTensor.of(Batch(ids, positions, torch.zeros_like(ids), positions > 3)),
        about={"fingerprint": "random"},
    )
    data._splits = {"train": split}
    return data


def train(family: Path, name: str, steps: int, every: int) -> None:
    """One process: resume what there is, train to the end, leave the weights."""
    sys.stderr = (family / f"{name}.log").open("w")
    torch.set_num_threads(1)
    silence_warnings()
    seed_everything(1, verbose=False)
    resume = find_resume("auto", family, lambda note: print(note, file=sys.stderr, flush=True))
    target = make_target()
    drafter = Eagle3.for_target(target, torch.arange(0, VOCABULARY, 2), ttt_steps=3)
    module = DrafterModule(drafter.train(), target, OptimizerSettings(learning_rate=1e-3))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[StopSignal(), RunCheckpoint(family / name / "checkpoints", every, keep=2)],
    )
    trainer.fit(module, make_data(), ckpt_path=resume, weights_only=True)


def last_step(family: Path) -> int:
    """Steps in the newest whole checkpoint."""
    path = find_resume("auto", family, lambda note: None)
    return int(path.stem.removeprefix("step-")) if path else 0


def weights(family: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, with the optimizer's states."""
    path = find_resume("auto", family, lambda note: None)
    saved = torch.load(path, weights_only=True)  # type: ignore[arg-type]
    moments = {
        f"{number} {name}": value
        for number, state in saved["optimizer_states"][0]["state"].items()
        for name, value in state.items()
    }
    return saved["state_dict"] | moments


def main() -> None:
    """Left alone, then killed; compare and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    server = multiprocessing.get_context("forkserver")
    # Processes fork from one that has imported these and run nothing.
    server.set_forkserver_preload(["specdraft.training.fit", "specdraft.drafters.eagle", _LLAMA])
    chance = random.Random(options.seed)
    began = time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        alone, family = Path(folder, "alone"), Path(folder, "killed")
        alone.mkdir()
        family.mkdir()

        def start(where: Path, name: str) -> Any:
            process = server.Process(target=train, args=(where, name, options.steps, options.every))
            process.start()
            return process

        start(alone, "whole").join()
        measured = time.monotonic()
        start(alone, "finished").join()  # starts, finds nothing left to do, ends: what starting takes
        starting = time.monotonic() - measured

        kills: list[dict[str, Any]] = []
        while len(kills) < options.kills:
            before = last_step(family)
            process, started = start(family, f"{len(kills):02d}"), time.monotonic()
            # While it starts or makes its first steps, or some time behind its first checkpoint.
            goal = before + chance.choice((0, 1)) * options.every
            while process.exitcode is None and last_step(family) < goal:
                process.join(0.002)
            process.join(chance.uniform(0, 1.2 * starting if goal == before else 0.1))
            if process.exitcode is not None:
                raise SystemExit(f"the run ended before it was killed {options.kills} times: more --steps are needed")
            process.kill()
            process.join()
            halves = len(list(family.glob("*/checkpoints/.*.tmp"))) - sum(kill["half_written"] for kill in kills)
            kills.append(
                {
                    "after_seconds": round(time.monotonic() - started, 3),
                    "steps_before": before,
                    "steps_saved": last_step(family),
                    "half_written": halves,
                }
            )
        final = start(family, "final")
        final.join()
        ours, theirs = weights(family), weights(alone)
        reached = last_step(family), last_step(alone)

    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    equal = ours.keys() == theirs.keys() and not different and reached == (options.steps, options.steps)
    header = ("kill", "after s", "resumed at", "saved", "half-written files")
    print_table(header, [(str(n), *map(str, kill.values())) for n, kill in enumerate(kills)])
    seconds = time.monotonic() - began
    print(
        f"\n{reached[0]} steps, {len(kills)} kills, {seconds:.0f} s: {len(theirs)} tensors, {len(different)} different"
    )
    result = {
        "equal_bit_for_bit": equal,
        "tensors": len(theirs),
        "different": different,
        "seconds": round(seconds),
        "starting_seconds": round(starting, 3),
        "kills": kills,
    }
    print(write_result("kill", vars(options), result))
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
