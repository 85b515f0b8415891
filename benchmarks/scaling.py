"""Training on one rank and on two: tokens/s, share of communication, memory by ZeRO stage, checkpoint size and time.

``python benchmarks/scaling.py [--hidden-size 1024] [--vocab-size 16384]``. An EAGLE-3 head on a random Llama target,
the same rows per rank in every case, one thread per rank. Every case has processes of its own, over gloo; they follow
each other. Without GPUs this shows what the strategies cost and save, not how fast a network is.

- tokens/s: of all ranks, the median step of those behind the warm-up.
- communication: time inside gloo's collectives over wall time, of a few profiled steps; what overlaps with arithmetic
  counts as well, and a rank that waits for the other is inside one.
- memory: peak of the resident set over what the process held before training, target included there.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from common import print_table, write_result
from specdraft.drafters.eagle import Eagle3
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.training import strategies
from specdraft.training.checkpoints.file import CheckpointFile
from specdraft.training.module import DrafterModule
from specdraft.training.monitoring.silence_warnings import silence_warnings
from specdraft.training.schedule import OptimizerSettings
from step_worker import status

CASES = {"one rank": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2}
WARM_UP, PROFILED = 2, 2


class Rows(Dataset[Batch]):
    """Random rows ``[B, T]``, all of whose tokens are to be learnt."""

    def __init__(self, vocab_size: int, rows: int, tokens: int, rank: int) -> None:
        self.sizes, self.vocab_size, self.rank = (rows, tokens), vocab_size, rank

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> Batch:
        """Batch number ``index`` of this rank."""
        ids = torch.randint(self.vocab_size, self.sizes, generator=torch.Generator().manual_seed(2 * index + self.rank))
        positions = torch.arange(self.sizes[1]).repeat(self.sizes[0], 1)
        return Batch(ids, positions, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))


class Clock(Callback):
    """Seconds of each step, the share of communication in the last ones, and then a checkpoint."""

    def __init__(self, directory: Path, steps: int) -> None:
        self.directory, self.steps = directory, steps
        self.seconds: list[float] = []
        self.result: dict[str, float] = {}
        self.profile: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the step's clock; from some step on the profiler's too."""
        if batch_idx == self.steps:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.start()
            self.profiled_since = time.perf_counter()
        self.since = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop it."""
        if self.profile is None:
            self.seconds.append(time.perf_counter() - self.since)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the profiler and the memory, and save."""
        wall = time.perf_counter() - self.profiled_since
        self.profile.stop()
        events = self.profile.key_averages()
        inside = sum(event.cpu_time_total for event in events if event.key.startswith("gloo:")) / 1e6
        self.result = {"communication_share": inside / wall, "peak_mib": status("VmHWM")}
        path, since = self.directory / "last.ckpt", time.perf_counter()
        trainer.strategy.checkpoint_io = CheckpointFile()  # as RunCheckpoint does
        trainer.save_checkpoint(path)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        self.result |= {
            "checkpoint_seconds": time.perf_counter() - since,
            "checkpoint_mb": sum(file.stat().st_size for file in files) / 1e6,
        }


def work(case: str, settings: dict[str, int], directory: Path) -> None:
    """One rank of a case; the first prints what it measured."""
    rank, ranks = int(os.environ["RANK"]), CASES[case]
    torch.set_num_threads(1)
    silence_warnings()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    torch.manual_seed(0)
    hidden, vocab_size = settings["hidden_size"], settings["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=6,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=settings["tokens"],
    )
    target = Target.from_model(LlamaForCausalLM(config).float(), name="random")
    drafter = Eagle3.for_target(target, torch.arange(vocab_size), ttt_steps=settings["ttt_steps"]).train()
    strategy = "ddp" if case == "ddp" else strategies.deepspeed(int(case[-1])) if case[:4] == "zero" else "auto"
    clock = Clock(directory, WARM_UP + settings["steps"])
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=WARM_UP + settings["steps"] + PROFILED,
        callbacks=[clock],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = DrafterModule(drafter, target, OptimizerSettings())
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    held = status("VmRSS")
    rows = Rows(vocab_size, settings["rows"], settings["tokens"], rank)
    trainer.fit(module, DataLoader(rows, batch_size=1, collate_fn=itemgetter(0)))
    seconds = clock.seconds[WARM_UP:]
    result = {
        "parameters": sum(parameter.numel() for parameter in Eagle3(**drafter.config()).parameters()),
        "tokens_per_second": ranks * settings["rows"] * settings["tokens"] / statistics.median(seconds),
        "memory_mib": clock.result.pop("peak_mib") - held,
        **clock.result,
        "seconds": seconds,
    }
    if rank == 0:
        print(json.dumps(result), file=answers, flush=True)


def measure(case: str, settings: dict[str, int]) -> dict[str, Any]:
    """Run a case's ranks and read what the first one says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for rank in range(CASES[case]):
            place = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": CASES[case], "MASTER_PORT": port}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, __file__, "--worker", case, json.dumps(settings), directory]
            processes.append(
                subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
        said = [process.communicate() for process in processes]
    for process, (_, problems) in zip(processes, said, strict=True):
        if process.returncode != 0:
            sys.exit(f"error: the case {case} failed:\n{problems[-2000:]}")
    return json.loads(said[0][0])


def main() -> None:
    """Parse options, measure all cases, print a table, write the result."""
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch on each rank (default 2)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row (default 128)")
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each case (default 5)")
    settings = vars(parser.parse_args())

    cases = {case: measure(case, settings) for case in CASES}
    alone = cases["one rank"]["tokens_per_second"]
    rows = [
        [
            name,
            f"{case['tokens_per_second']:.0f}",
            f"{case['tokens_per_second'] / alone:.2f}x",
            f"{case['communication_share']:.0%}",
            f"{case['memory_mib']:.0f}",
            f"{case['checkpoint_mb']:.1f}",
            f"{case['checkpoint_seconds']:.2f}",
        ]
        for name, case in cases.items()
    ]
    print(f"EAGLE-3 head of {cases['one rank']['parameters'] / 1e6:.1f} M parameters")
    print_table(["", "tokens/s", "of one", "communication", "memory MiB", "checkpoint MB", "seconds"], rows)
    print(f"\nwritten to {write_result('scaling', settings, {'cases': cases})}")


if __name__ == "__main__":
    main()
