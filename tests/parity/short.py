"""The short drafters that ``make parity`` compares: one of every family, and EAGLE-3 as others publish it.

All are trained once, on the same answers of the embedded target, with a core each; the next run finds them."""

import multiprocessing
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from specdraft.drafters.checkpoint import find
from specdraft.errors import UserError

REPOSITORY = Path(__file__).parents[2]
TARGET = "embedded://tiny"
# Trainings are forked from a process that has imported everything, which takes as long as most of them.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["specdraft.commands.train", "specdraft.training.fit", "specdraft.training.preflight"])
TRAINING = (
    "trainer.accelerator=cpu",
    "model.optimizer.name=adamw",  # ahead of Muon in so few steps
    "data.limit=160",  # the same for all, so that the target answers once
    "data.validation_limit=16",
    "live.every_n_steps=0",
    "live.prompts=2",
    "live.max_new_tokens=16",
    "evaluate=false",
    "export=null",
)
# Equality means nothing for a drafter that is not accepted; Medusa's later heads seldom are.
LEAST_ACCEPTANCE_LENGTH = {
    "eagle3": 1.5,
    "eagle": 1.4,
    "medusa": 1.25,
    "p_eagle": 1.3,
    "mtp": 1.5,
    "dflash": 1.25,
    "draft_model": 1.5,
    "pard": 1.3,
    "tli_draft": 1.3,
}


@dataclass(frozen=True)
class Short:
    """How a short drafter is trained. options: what makes it a variant, of ``model.drafter``. draft_vocab_size: of a
    vocabulary of its own; None: as the recipe has it."""

    model: str
    steps: int
    options: tuple[str, ...] = ()
    draft_vocab_size: int | None = None

    def overrides(self, target: str | None = None) -> list[str]:
        """Of ``train.py``; target: another one than the embedded one, which is not asked for answers."""
        options = [f"model.drafter.{option}" for option in self.options]
        # Engines serve Medusa heads with the whole vocabulary.
        size = "null" if self.model == "medusa" else self.draft_vocab_size
        vocabulary = [] if size is None else [f"model.draft_vocab_size={size}"]
        made = [] if target is None else [f"target.name={target}", "data.regenerate=false"]
        return [f"model={self.model}", *TRAINING, f"trainer.max_steps={self.steps}", *options, *vocabulary, *made]


PAPER = ("fc_norm=false", "norm_output=false", "ttt_steps=5", "step_decay=0.8")  # EAGLE-3 as it was published
FEW_STEPS = ("ttt_steps=3",)  # drafts are longer, and what they read at every step is the same
# Enough to be accepted in a minute of 2 cores; a better drafter would show nothing more. Together the variants
# have every option of EAGLE-3 that vLLM computes, in its Llama and its Qwen3 class. Windows are shorter than prompts.
SHORT = {
    "eagle3": Short("eagle3", 90, PAPER, 2048),
    "eagle": Short("eagle", 70),
    "medusa": Short("medusa", 50),
    "draft": Short("draft", 30),
    "dflash": Short("dflash", 110, ("num_layers=2", "block_size=6")),
    "p_eagle": Short("p_eagle", 80),
    "mtp": Short("mtp", 50),
    "mtp-mimo": Short("mtp", 90),
    "pard": Short("draft", 60, ("parallel=true", "num_drafts=5")),
    "eagle3-llama": Short(
        "eagle3",
        60,
        (
            *FEW_STEPS,
            "norm_before_fc=true",
            "norm_before_residual=true",
            "norm_output=true",
            "own_embedding=true",
            "attention_bias=true",
            "sliding_window=24",
            "fc_norm=false",
        ),
        2048,
    ),
    "eagle3-qwen3": Short(
        "eagle3",
        60,
        (
            *FEW_STEPS,
            "qk_norm=true",
            "fc_norm=true",
            "num_layers=2",
            "layers=[2,6,11,16]",  # four, the last layer's output among them
            "sliding_window=32",
            "norm_output=false",
        ),
        2048,
    ),
}


# For the embedded target as a MiMo (``mimo.py``), whose own layer they begin as.
MIMO = ("mtp-mimo",)
# With another tokenizer than the target's (``stranger.py``); compared when it is asked for by name.
STRANGERS = {"tli_draft": Short("draft", 100, ("start=checkpoint",))}
# What is quantized after its training: the short drafter, and the scheme.
QUANTIZED = {
    "eagle3_int8": ("eagle3", "int8"),
    "draft_int8": ("draft", "int8"),
}
# What is written in the layout of speculators instead of vLLM's plain one, and the short drafter that it is.
SPECULATORS = {f"{name}_speculators": name for name in ("eagle3", "p_eagle", "dflash")}


def source(name: str) -> tuple[str, str | None]:
    """The short drafter behind a name of any of these tables, and the scheme that it is quantized by."""
    return QUANTIZED.get(name, (SPECULATORS.get(name, name), None))


def trained(name: str, work: Path, target: str | None = None, start: str | None = None) -> Path:
    """The checkpoint of the short drafter ``name``, trained by one core if it is not in ``work`` yet. start: what it
    begins as, for those of ``STRANGERS``."""
    run, log = work / name, work / f"{name}.log"
    try:
        return find(run)
    except UserError:
        print(f"training a short {name}, see {log}", flush=True)
        shutil.rmtree(run, ignore_errors=True)
        overrides = (SHORT | STRANGERS)[name].overrides(target)
        overrides += [] if start is None else [f"model.drafter.checkpoint={start}"]
        process = _SERVER.Process(target=_train, args=([*overrides, f"hydra.run.dir={run}"], log))
        process.start()
        process.join()
        _check(process.exitcode, log, f"training a short {name}")
        return find(run)


def _train(overrides: list[str], log: Path) -> None:
    """train.py in a process of its own, of one thread; what it says is in ``log``."""
    from specdraft.commands import train

    with log.open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.chdir(REPOSITORY)
    sys.argv = ["train.py", *overrides]
    train.main()


def command(arguments: list[str], log: Path, what: str, python: str | Path = sys.executable) -> None:
    """Run a script of the repository with one thread. Raises UserError with the end of its ``log`` if it fails."""
    with log.open("w") as output:
        done = subprocess.run(
            [str(python), *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
    _check(done.returncode, log, what)


def _check(status: int | None, log: Path, what: str) -> None:
    if status != 0:
        raise UserError(f"{what} failed: {log} says why\n{log.read_text()[-2000:]}") from None
